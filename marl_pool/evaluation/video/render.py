"""Videos of trained policies, with their attention drawn into the frames."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.marks import Glyphs, draw_selection
from marl_pool.envs.patches import outline
from marl_pool.envs.timeout import env_call
from marl_pool.evaluation.cases import label, perturb
from marl_pool.evaluation.computing import computing
from marl_pool.evaluation.load import target_from_run
from marl_pool.evaluation.results import CLEAN
from marl_pool.evaluation.settings import RenderSettings
from marl_pool.evaluation.standalone import name_of
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.evaluation.video.frames import (
    Caption,
    grid_frames,
    with_caption,
    with_steps,
    write_frames,
)
from marl_pool.files.atomic import beside_of, make_folder
from marl_pool.options.names import short_name
from marl_pool.options.types import Options
from marl_pool.perturbations.perception import Mark, Perception
from marl_pool.policies.base import Policy, State, head_name
from marl_pool.rollout import Rollout
from marl_pool.tokens import SELF_TYPE, Tokens, identity_origin
from marl_pool.trajectory import Transition
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import Progress

if TYPE_CHECKING:
    from marl_pool.runs.run import Run

LEGEND_ROWS = 2
"""Lines reserved for the legend of a perturbation's marks."""
Head = str | int
"""``"mean"`` over all attention heads, or the number of one."""


def attention_of(
    policy: Policy, tokens: Tokens, *, head: Head = "mean", memory: State = ()
) -> Tensor | None:
    """Compute the first agent's attention weights over its perceived tokens, ``(M,)``.

    The tokens are of one environment, and ``memory`` is the recurrent state of the
    policy. None if its pooling head has no attention weights.

    Raises:
        InputError: an unknown head.
    """
    with torch.no_grad():
        heads = policy.attention_weights(tokens, memory)
    if heads is None:
        return None
    weights = heads[0, 0]
    if isinstance(head, int) and 0 <= head < len(weights):
        return weights[head]
    if head == "mean":
        return weights.mean(0)
    raise InputError(f"head: expected mean or 0 to {len(weights) - 1}, got {head}")


def episode_frames(
    rollout: Rollout,
    *,
    source: str = "",
    text: str = "",
    head: Head | None = "mean",
    size: int = 512,
    top: int = 0,
    group: str | None = None,
    steps: bool = True,
    legend_rows: int | None = None,
) -> Iterator[np.ndarray]:
    """Play an episode and draw its frames.

    Each frame shows the environment before a step, what the policy perceives of it, and
    its attention in that step. The last frame shows the final state.

    Args:
        rollout: rollout of one environment.
        source: name of the policy.
        text: caption of all frames.
        head: attention head to draw, or None to draw no attention.
        size: width of a frame in pixels; the caption adds to its height.
        top: number of most attended patches to outline; 0 draws tints instead.
        group: group whose first agent's return and attention are shown, or None for
            the first group.
        steps: write the number of the step.
        legend_rows: lines reserved for the legend of marks; None is `LEGEND_ROWS` with
            a perturbation and 0 without one.

    Yields:
        ``(height, width, 3)`` uint8 RGB.
    """
    group = group or next(iter(rollout.env.groups))
    if legend_rows is None:
        legend_rows = LEGEND_ROWS if rollout.perturbation is not None else 0
    policy = rollout.policies[group]
    title = " ".join(filter(None, (source, f"({head_name(policy)})")))
    painter = _FramePainter(rollout, group, size, top, steps, title, text, legend_rows)
    prev_env, step, total = first_env(rollout.env), 0, 0.0
    # Draw each step's observation with the attention that it received.
    for transition in rollout.transitions():
        weights, tokens = None, transition.tokens[group]
        if head is not None:
            memory = transition.states[group]
            weights = attention_of(policy, tokens, head=head, memory=memory)
            if weights is None and step == 0:
                painter.title += "   no attention weights"
        perceived = _perceive(rollout, prev_env, tokens, group)
        change = _action_change(rollout, transition, group)
        selected = _selected(rollout, transition, group)
        if selected is not None and perceived.true.padding[selected]:
            selected = None  # such as the choice of an absent agent
        yield painter.draw(prev_env, step, total, perceived, weights, change, selected)
        # A transition holds the environment after its step.
        prev_env, step = first_env(transition.env), step + 1
        total += float(transition.step.rewards[group][0, 0])
    yield painter.draw(prev_env, step, total)


@dataclass
class _FramePainter:
    """Drawing of an episode's frames; the fields are as in `episode_frames`."""

    rollout: Rollout
    group: str
    size: int
    top: int
    steps: bool
    title: str
    """First line of the caption."""
    text: str
    legend_rows: int
    legend: set[Mark] = field(default_factory=set)
    """Marks that have occurred; they stay in the legend."""

    def draw(
        self,
        env: BatchedEnv,
        step: int,
        total: float,
        perceived: Perception | None = None,
        weights: Tensor | None = None,
        change: str = "",
        selected: int | None = None,
    ) -> np.ndarray:
        """Draw an environment with its caption.

        Args:
            env: a single environment.
            step: number of the step.
            total: return of the first agent so far.
            perceived: what the first agent perceives; None after the last step.
            weights: its attention weights, ``(M,)``.
            change: the change of its action, in words.
            selected: the token that it selects.
        """
        image = self._picture(env, perceived, weights)
        words = [f"step {step}"] if self.steps else []
        words.append(f"return {total:.3f}")
        glyphs = None
        if perceived is not None:
            self.legend.update(perceived.marks())
            glyphs = self._glyphs(env, perceived.seen)
            if selected is not None:
                true_glyphs = self._glyphs(env, perceived.true)
                types = perceived.true.types.tolist()
                if true_glyphs is not None and SELF_TYPE in types:
                    observer = types.index(SELF_TYPE)
                    image = draw_selection(image, true_glyphs, observer, selected)
                spec = self.rollout.env.groups[self.group].tokens
                words.append(f"selects {spec.type_names[types[selected]]}")
            if weights is not None and perceived.injected.any():
                share = float(weights[perceived.injected].sum())
                words.append(f"attention on injected {share:.0%}")
        lines = (self.title, self.text, "   ".join(filter(None, (*words, change))))
        perturbation = self.rollout.perturbation
        text = CLEAN if perturbation is None else perturbation.label
        caption = Caption(lines, text, self.legend, self.legend_rows, perceived, glyphs)
        return with_caption(image, caption)

    def _picture(
        self, env: BatchedEnv, perceived: Perception | None, weights: Tensor | None
    ) -> np.ndarray:
        # Outlines of the most attended patches take the place of tints.
        tints = None if self.top else weights
        with env_call(env, "a picture"):
            image = env.frame(
                attention=tints, group=self.group, size=self.size, perception=perceived
            )
        if self.top and perceived is not None and weights is not None:
            patches = perceived.by_origin(weights.cpu())
            image = outline_top(image, env, patches, self.top)
        return image

    def _glyphs(self, env: BatchedEnv, tokens: Tokens) -> Glyphs | None:
        return env.glyphs(tokens, 0, group=self.group, agent=0, size=self.size)


def _perceive(
    rollout: Rollout, env: BatchedEnv, tokens: Tokens, group: str
) -> Perception:
    """Relate the first agent's tokens to the environment that it observed."""
    true = env.observe()[group]
    state = rollout.perturbation_state(group, 0)
    if rollout.perturbation is None or not state:
        perceived = Perception.compare(true, tokens, identity_origin(true), CLEAN)
    else:
        perceived = rollout.perturbation.for_group(group).perceive(true, tokens, state)
    return perceived.at((0, 0)).cpu()


def _action_change(rollout: Rollout, transition: Transition, group: str) -> str:
    """Describe how the first agent's action was changed; empty if it was not."""
    env = rollout.env
    # Compare what the environment makes of them: perturbations clip all actions.
    action, executed = (
        env.groups[group].actions.clip(actions[group][0, 0])
        for actions in (transition.actions, transition.executed)
    )
    if not executed.is_floating_point():
        is_same = executed.equal(action)
        return "" if is_same else f"action {executed.tolist()} for {action.tolist()}"
    distance = float((executed.to(env.dtype) - action.to(env.dtype)).norm())
    return f"action off by {distance:.2f}" if distance else ""


def _selected(rollout: Rollout, transition: Transition, group: str) -> int | None:
    """Return the token that the first agent selected, or None for a fixed option."""
    actions = rollout.env.groups[group].actions
    if not actions.selects:
        return None
    token = int(transition.executed[group][0, 0]) - actions.num_fixed
    return token if token >= 0 else None


def outline_top(
    image: np.ndarray, env: BatchedEnv, weights: Tensor, top: int
) -> np.ndarray:
    """Outline the ``top`` most attended patches in a frame of an environment.

    ``weights`` are the attention weights of all patches, ``(N,)``.
    """
    assert env.patch_grid is not None
    most = weights.topk(min(top, len(weights))).indices
    return outline(image, env.patch_grid, most.tolist())


def render_run(
    run: "Run",
    settings: RenderSettings,
    *,
    perturbation: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
    plugins: Collection[str] = (),
) -> Path:
    """Write a video of a run's policy to the run's ``videos/``, and return its path.

    Its episodes are the first ones of `evaluate_run` at the same seed. A perturbation
    is ``{"name": …, **options}``; None, or the name "none", leaves episodes clean.
    Other arguments are as in `target_from_run`.

    Raises:
        InputError: a run without such a policy, a wrong perturbation or attention
            head, patches to outline where tokens are not patches, an environment that
            cannot be drawn, or no OpenCV.
    """
    target = load_target(run, settings, env=env, plugins=plugins)
    place = run.make_videos_dir() / f"{video_name(perturbation)}.{settings.format}"
    targets = {shown_name(run): target}
    with beside_of(place) as folder:
        folder.mkdir(0o700)
        write_video(folder / place.name, targets, settings, perturbation)
        return run.add_video(folder / place.name)


def shown_name(run: "Run") -> str:
    """Return a run's name or, if it was created to hold a policy, the policy's."""
    return name_of(str(run.config.get("policy_from") or "")) or run.name


def render_side_by_side(
    folder: Path,
    targets: Mapping[str, EvaluationTarget],
    settings: RenderSettings,
    perturbation: Mapping[str, Any] | None,
) -> Path:
    """Write a video with a column for each target to a new folder, and return it."""
    make_folder(folder)
    path = folder / f"{video_name(perturbation)}.{settings.format}"
    write_video(path, targets, settings, perturbation)
    return path


def load_target(
    run: "Run",
    settings: RenderSettings,
    *,
    env: Mapping[str, Any] | None,
    plugins: Collection[str],
) -> EvaluationTarget:
    """Load the policies of a run; arguments and errors as in `render_run`."""
    with computing(settings.threads, settings.kernels, device=settings.device):
        target = target_from_run(run, settings, env=env, plugins=plugins)
    if settings.top_patches and target.describe().patch_grid is None:
        raise InputError(
            f"top_patches: expected 0 for the env {target.env['name']}, whose "
            f"tokens are not patches, got {settings.top_patches}"
        )
    return target


def video_name(perturbation: Mapping[str, Any] | None) -> str:
    """Return the perturbation's name without its module, or "clean"."""
    options = _without_none(perturbation)
    return CLEAN if options is None else short_name(options.name)


def write_video(
    path: Path,
    targets: Mapping[str, EvaluationTarget],
    settings: RenderSettings,
    perturbation: Mapping[str, Any] | None,
) -> None:
    """Write a video with a column for each target and a row for each episode.

    The names of the targets are shown in their frames.
    """
    options, rows = _without_none(perturbation), settings.rows
    total = settings.episodes * rows
    frame_options: dict[str, Any] = {
        "head": settings.head if settings.attention else None,
        "size": settings.size,
        "top": settings.top_patches,
        "steps": False,
        "legend_rows": 0 if options is None else LEGEND_ROWS,
    }
    # Columns are targets times conditions.
    beside_clean = settings.beside_clean and options is not None
    columns = list(product(targets, [None, options] if beside_clean else [options]))
    longest = max(target.describe().max_steps for target in targets.values())
    num_frames = settings.episodes * (longest + 1)

    def play(number: int, name: str, condition: Options | None) -> Iterator[np.ndarray]:
        env, policies = targets[name].make_env(1, first=number), targets[name].policies
        change = None if condition is None else perturb(condition, env)
        explore = settings.stochastic
        rollout = Rollout(env, policies, perturbation=change, explore=explore)
        text = f"episode {number + 1} of {total}   " if total > 1 else ""
        text += _condition(condition)
        return episode_frames(rollout, source=name, text=text, **frame_options)

    def frames(progress: Progress) -> Iterator[np.ndarray]:
        done = 0
        for first in range(0, total, rows):
            # Play the episodes of a row of the grid side by side.
            numbers = range(first, first + rows)
            grid = [[play(number, *column) for column in columns] for number in numbers]
            for image in with_steps(grid_frames(grid)):
                yield image
                done += 1
                progress.update(done)

    with (
        computing(
            settings.threads, settings.kernels, settings.env_timeout, settings.device
        ),
        Progress(num_frames, unit="frames") as progress,
    ):
        write_frames(path, frames(progress), settings.fps)


def _without_none(options: Mapping[str, Any] | None) -> Options | None:
    """Replace the configuration ``perturbation=none`` by None."""
    return None if options is None else Options(options).or_none


def _condition(options: Options | None) -> str:
    if options is None:
        return CLEAN
    arguments = options.arguments
    severity = arguments.pop("severity", None)
    at = "" if severity is None else f"   severity {severity:g}"
    return label(options.name, arguments) + at


def first_env(env: BatchedEnv) -> BatchedEnv:
    """Copy the first environment with its current state."""
    return env.select(torch.zeros(1, dtype=torch.int64, device=env.device))
