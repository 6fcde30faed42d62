"""Videos of a policy at work, with its attention drawn in."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.patches import outline
from marl_pool.evaluation.cases import label, perturb
from marl_pool.evaluation.loading import EvaluationTarget, cpu_threads
from marl_pool.evaluation.results import CLEAN
from marl_pool.evaluation.settings import RenderSettings
from marl_pool.evaluation.video.tiling import Tile, frames_of
from marl_pool.evaluation.video.webm import Writer, captioned
from marl_pool.perturbations.base import PerturbationState
from marl_pool.policies.base import Policy, State
from marl_pool.rollout import Rollout, Transition
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import Progress

if TYPE_CHECKING:
    from marl_pool.runs import Run

Head = str | int
"""``"mean"`` of all attention heads, or the number of one."""


class Attention(NamedTuple):
    """One agent's attention to what the world shows it."""

    weights: Tensor
    """``(N,)`` of the tokens in the world's own order."""
    injected: float
    """The share on tokens that are not of the world."""


def attention_of(
    policy: Policy,
    tokens: Tokens,
    state: PerturbationState,
    num_tokens: int,
    *,
    agent: int = 0,
    head: Head = "mean",
    memory: State = (),
) -> Attention | None:
    """Read one agent's attention and lead it back to the world's tokens.

    Args:
        policy: of the agent.
        tokens: what it saw, in one world.
        state: of the perturbation in between; its ``origin`` says where each token
            came from. Empty without one.
        num_tokens: N, how many tokens the world shows.
        agent: its number in its group.
        head: the mean of the heads, or one of them.
        memory: what the policy remembered.

    Returns:
        None if the policy's pooling head has no weights.

    Raises:
        InputError: no such head.
    """
    with torch.no_grad():
        heads = policy.weights(tokens, memory)
    if heads is None:
        return None
    weights = _choose_head(heads[0, agent], head)
    if "origin" not in state:
        return Attention(weights, 0.0)
    origin = state["origin"][0, agent]
    known = origin >= 0
    own = weights.new_zeros(num_tokens).index_add(0, origin[known], weights[known])
    return Attention(own, float(weights[~known].sum()))


class Film:
    """Draw an episode as it is played: a hook for `Rollout.episodes`.

    A frame shows the world as it was when the policy decided, and what it attended
    to then; after the last step another shows how the episode ended.

    Args:
        rollout: of one world.
        show: takes each frame, ``(height, width, 3)`` uint8 RGB.
        about: a line of text for all frames.
        head: whose attention is drawn; None for none.
        size: width of a frame in pixels; it is a little higher.
        top: outline so many patches that get most attention, in place of tints.
        group: whose return is counted and attention drawn; None for the first.
        agent: its number in the group.
    """

    def __init__(
        self,
        rollout: Rollout,
        show: Callable[[np.ndarray], None],
        *,
        about: str = "",
        head: Head | None = "mean",
        size: int = 512,
        top: int = 0,
        group: str | None = None,
        agent: int = 0,
    ) -> None:
        self.rollout, self.show, self.about = rollout, show, about
        self.head, self.size, self.top, self.agent = head, size, top, agent
        self.group = group or next(iter(rollout.env.groups))
        self.num_tokens = rollout.env.groups[self.group].tokens.num_tokens
        self.before = _copy(rollout.env)
        self.total, self.steps = 0.0, 0

    def __call__(self, transition: Transition) -> None:
        """Draw the frame of one step."""
        self._draw(self._attention(transition))
        self.total += float(transition.step.rewards[self.group][0, self.agent])
        self.steps += 1
        self.before = _copy(transition.env)
        if transition.step.terminated[0] | transition.step.truncated[0]:
            self._draw(None)

    def _attention(self, transition: Transition) -> Attention | None:
        if self.head is None:
            return None
        return attention_of(
            self.rollout.policies[self.group],
            transition.tokens[self.group],
            self.rollout.perturbed.get(self.group, {}),
            self.num_tokens,
            agent=self.agent,
            head=self.head,
            memory=transition.states[self.group],
        )

    def _draw(self, attention: Attention | None) -> None:
        weights = None if attention is None else attention.weights
        image = self.before.frame(
            attention=None if self.top else weights,
            group=self.group,
            agent=self.agent,
            size=self.size,
        )
        if self.top and weights is not None:
            image = with_top(image, self.before, weights, self.top)
        state = f"step {self.steps}   return {self.total:.3f}"
        if attention is not None and attention.injected:
            state += f"   attention on injected {attention.injected:.0%}"
        self.show(captioned(image, (self.about, state)))


def with_top(
    image: np.ndarray, env: BatchedEnv, weights: Tensor, top: int
) -> np.ndarray:
    """Outline the patches that get most attention.

    Args:
        image: a frame of the world.
        env: whose tokens are patches.
        weights: ``(N,)`` of the tokens in the world's own order.
        top: how many.
    """
    assert env.patch_grid is not None
    most = weights.topk(min(top, len(weights))).indices
    return outline(image, env.patch_grid, most.tolist())


def render_run(
    run: "Run", settings: Mapping[str, Any], *, plugins: Collection[str] = ()
) -> Path:
    """Write a video of a run's policy to the run's ``videos/``.

    Its episodes are the first of `evaluate_run` at the same seed. WebM with VP9 plays
    in browsers.

    Args:
        run: an earlier run.
        settings: of `RenderSettings`, ``perturbation`` and ``env``, as plain data.
        plugins: ``package.module:Class`` names that the run may use.

    Returns:
        The file.

    Raises:
        InputError: no policy in the run, a wrong perturbation, no such attention
            head, no patches to outline, a world that cannot be drawn, no OpenCV.
    """
    with cpu_threads(settings["threads"]):
        subject = load_subject(run, settings, plugins)
        path = run.new_video_path(video_name(settings))
        film_to(path, {"": subject}, settings)
    return path


def load_subject(
    run: "Run", settings: Mapping[str, Any], plugins: Collection[str]
) -> EvaluationTarget:
    """Read a run that is to be filmed; arguments and errors as of `render_run`."""
    subject = EvaluationTarget.from_run(
        run,
        RenderSettings.from_config(settings),
        env=settings["env"],
        rescale_codes=settings["rescale_codes"],
        plugins=plugins,
    )
    if settings["top_patches"] and subject.make_env(1).patch_grid is None:
        raise InputError(
            f"top_patches: expected 0 for the env {subject.env['name']}, whose "
            f"tokens are no patches, got {settings['top_patches']}"
        )
    return subject


def video_name(settings: Mapping[str, Any]) -> str:
    """What a video shows, in a word."""
    options = _perturbation(settings)
    return CLEAN if options is None else options["name"].rpartition(":")[2]


def film_to(
    path: Path, subjects: Mapping[str, EvaluationTarget], settings: Mapping[str, Any]
) -> None:
    """Film subjects side by side, a column each; worlds are rows.

    Args:
        path: of the video.
        subjects: by what is written in their frames.
        settings: of `RenderSettings` and ``perturbation``.
    """
    options, count = _perturbation(settings), settings["episodes"]
    rows = settings["rows"]
    conditions = [options]
    if settings["beside_clean"] and options is not None:
        conditions.insert(0, None)
    longest = max(subject.make_env(1).max_steps for subject in subjects.values())
    with (
        Writer(path, settings["fps"]) as writer,
        Progress(count * (longest + 1), unit="frames") as progress,
    ):
        for episode in range(count):
            grid = [
                [
                    _tile(subject, settings, episode * rows + row, condition, name)
                    for name, subject in subjects.items()
                    for condition in conditions
                ]
                for row in range(rows)
            ]
            for image in frames_of(grid):
                writer.write(image)
                progress.update(writer.written)


def _tile(
    subject: EvaluationTarget,
    settings: Mapping[str, Any],
    number: int,
    options: Mapping[str, Any] | None,
    name: str,
) -> Tile:
    """One episode, at its start."""
    env = subject.make_env(1, first=number)
    many = settings["episodes"] * settings["rows"]
    which = f"episode {number + 1} of {many}   " if many > 1 else ""
    who = f"{name}   " if name else ""
    rollout = Rollout(
        env,
        subject.policies,
        perturbation=None if options is None else perturb(options, env),
        explore=settings["stochastic"],
    )
    frames: deque[np.ndarray] = deque()
    film = Film(
        rollout,
        frames.append,
        about=who + which + _condition(options),
        head=settings["head"] if settings["attention"] else None,
        size=settings["size"],
        top=settings["top_patches"],
    )
    return Tile(rollout.transitions(), film, frames)


def _perturbation(settings: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The options of the perturbation; configurations say "none" for doing without."""
    options: Mapping[str, Any] | None = settings["perturbation"]
    return None if options is None or options["name"] == "none" else options


def _condition(options: Mapping[str, Any] | None) -> str:
    if options is None:
        return CLEAN
    rest = {key: value for key, value in options.items() if key != "name"}
    severity = rest.pop("severity", None)
    at = "" if severity is None else f"   severity {severity:g}"
    return label(options["name"], rest) + at


def _choose_head(weights: Tensor, head: Head) -> Tensor:
    """From ``(heads, N)`` to ``(N,)``."""
    if head == "mean":
        return weights.mean(0)
    if not (isinstance(head, int) and 0 <= head < len(weights)):
        raise InputError(f"head: expected mean or 0 to {len(weights) - 1}, got {head}")
    return weights[head]


def _copy(env: BatchedEnv) -> BatchedEnv:
    """The first world as it stands now."""
    return env.select(torch.zeros(1, dtype=torch.int64, device=env.device))
