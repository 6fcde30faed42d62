"""Videos of trained policies, with their attention drawn into the frames."""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.patches import outline
from marl_pool.evaluation.cases import label, perturb
from marl_pool.evaluation.loading import EvaluationTarget, computing
from marl_pool.evaluation.results import CLEAN
from marl_pool.evaluation.settings import RenderSettings
from marl_pool.evaluation.video.tiling import grid_frames
from marl_pool.evaluation.video.webm import with_caption, write_webm
from marl_pool.perturbations.base import PerturbationState
from marl_pool.policies.base import Policy, State
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens
from marl_pool.utils.atomic import make_folder
from marl_pool.utils.errors import InputError
from marl_pool.utils.progress import Progress
from marl_pool.utils.types import Options

if TYPE_CHECKING:
    from marl_pool.runs import Run

Head = str | int
"""``"mean"`` over all attention heads, or the number of one."""


class Attention(NamedTuple):
    """Attention of one agent to the tokens of its environment."""

    weights: Tensor
    """``(N,)``, attention weights in the environment's order of tokens."""
    injected: float
    """Total attention weight of tokens that a perturbation injected."""


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
    """Compute one agent's attention to the unperturbed tokens.

    Args:
        policy: the agent's policy.
        tokens: perturbed tokens of one environment.
        state: state of the perturbation; ``origin`` holds each token's index before it.
            Empty without a perturbation.
        num_tokens: N, number of unperturbed tokens.
        agent: index of the agent in its group.
        head: mean of the attention heads, or the number of one.
        memory: recurrent state of the policy.

    Returns:
        None if the policy's pooling head has no attention weights.

    Raises:
        InputError: an unknown head.
    """
    with torch.no_grad():
        heads = policy.attention_weights(tokens, memory)
    if heads is None:
        return None
    # Select a head of the agent, or average over all.
    own = heads[0, agent]
    if isinstance(head, int) and 0 <= head < len(own):
        weights = own[head]
    elif head == "mean":
        weights = own.mean(0)
    else:
        raise InputError(f"head: expected mean or 0 to {len(own) - 1}, got {head}")
    # Without a perturbation that moves tokens, the weights apply as they are.
    if "origin" not in state:
        return Attention(weights, 0.0)
    # Move the weights to where the tokens come from; injected ones come from nowhere.
    origin = state["origin"][0, agent]
    known = origin >= 0
    original = weights.new_zeros(num_tokens)
    original = original.index_add(0, origin[known], weights[known])
    return Attention(original, float(weights[~known].sum()))


def episode_frames(
    rollout: Rollout,
    *,
    about: str = "",
    head: Head | None = "mean",
    size: int = 512,
    top: int = 0,
    group: str | None = None,
) -> Iterator[np.ndarray]:
    """Play an episode and draw its frames.

    Each frame shows the environment before a step and the policy's attention in that
    step. The last frame shows the final state.

    Args:
        rollout: rollout of one environment.
        about: text in all frames.
        head: attention head to draw; None for none.
        size: width of a frame in pixels; the caption adds to its height.
        top: number of most attended patches to outline; 0 draws tints instead.
        group: group whose first agent's return and attention are shown; None for the
            first.

    Yields:
        ``(height, width, 3)`` uint8 RGB.
    """
    # Draw the first group unless another is chosen.
    group = group or next(iter(rollout.env.groups))
    num_tokens = rollout.env.groups[group].tokens.num_tokens
    prev_env, steps, total = _first(rollout.env), 0, 0.0

    def draw(attention: Attention | None) -> np.ndarray:
        weights = None if attention is None else attention.weights
        image = prev_env.frame(
            attention=None if top else weights, group=group, size=size
        )
        if top and weights is not None:
            image = outline_top(image, prev_env, weights, top)
        state = f"step {steps}   return {total:.3f}"
        if attention is not None and attention.injected:
            state += f"   attention on injected {attention.injected:.0%}"
        return with_caption(image, (about, state))

    # Draw each step's observation with the attention that it received.
    for transition in rollout.transitions():
        attention = None
        if head is not None:
            attention = attention_of(
                rollout.policies[group],
                transition.tokens[group],
                rollout.perturbation_states.get(group, {}),
                num_tokens,
                head=head,
                memory=transition.states[group],
            )
        yield draw(attention)
        # A transition holds the environment after its step.
        prev_env, steps = _first(transition.env), steps + 1
        total += float(transition.step.rewards[group][0, 0])
    yield draw(None)


def outline_top(
    image: np.ndarray, env: BatchedEnv, weights: Tensor, top: int
) -> np.ndarray:
    """Outline the ``top`` most attended patches in a frame.

    Args:
        image: frame of the environment.
        env: an environment whose tokens are patches.
        weights: ``(N,)``, attention weights.
        top: number of patches.
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

    Its episodes are the first ones of `evaluate_run` at the same seed. The format is
    WebM with VP9, which browsers play.

    Args:
        run: an earlier run.
        settings: settings of the video.
        perturbation: ``{"name": …, **options}``; None or the name "none" for none.
        env: options of the environments, complete; None for the run's own.
        plugins: ``package.module:Class`` names that the run may use.

    Raises:
        InputError: a run without such a policy, a wrong perturbation or attention
            head, tokens that are no patches to outline, an environment that cannot be
            drawn, or no OpenCV.
    """
    target = load_target(run, settings, env=env, plugins=plugins)
    path = run.new_video_path(video_name(perturbation))
    write_video(path, {"": target}, settings, perturbation)
    return path


def render_side_by_side(
    folder: Path,
    targets: Mapping[str, EvaluationTarget],
    settings: RenderSettings,
    perturbation: Mapping[str, Any] | None,
) -> Path:
    """Write a video with a column for each target to a new folder, and return it."""
    make_folder(folder)
    path = folder / f"{video_name(perturbation)}.webm"
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
    with computing(settings.threads, settings.kernels):
        target = EvaluationTarget.from_run(run, settings, env=env, plugins=plugins)
    # Outlines need patches of an image.
    if settings.top_patches and target.describe().patch_grid is None:
        raise InputError(
            f"top_patches: expected 0 for the env {target.env['name']}, whose "
            f"tokens are no patches, got {settings.top_patches}"
        )
    return target


def video_name(perturbation: Mapping[str, Any] | None) -> str:
    """Return the perturbation's name without its module, or "clean"."""
    options = _without_none(perturbation)
    return CLEAN if options is None else options.name.rpartition(":")[2]


def write_video(
    path: Path,
    targets: Mapping[str, EvaluationTarget],
    settings: RenderSettings,
    perturbation: Mapping[str, Any] | None,
) -> None:
    """Write a video with a column for each target, and episodes as rows.

    The names of the targets are shown in their frames.
    """
    options, rows = _without_none(perturbation), settings.rows
    # Columns are targets times conditions.
    conditions: list[Options | None] = [options]
    if settings.beside_clean and options is not None:
        conditions.insert(0, None)
    longest = max(target.describe().max_steps for target in targets.values())
    num_frames = settings.episodes * (longest + 1)

    def frames(progress: Progress) -> Iterator[np.ndarray]:
        done = 0
        for first in range(0, settings.episodes * rows, rows):
            # Play the episodes of a row of the grid side by side.
            grid = [
                [
                    _episode(target, settings, episode, condition, name)
                    for name, target in targets.items()
                    for condition in conditions
                ]
                for episode in range(first, first + rows)
            ]
            for image in grid_frames(grid):
                yield image
                done += 1
                progress.update(done)

    with (
        computing(settings.threads, settings.kernels),
        Progress(num_frames, unit="frames") as progress,
    ):
        write_webm(path, frames(progress), settings.fps)


def _episode(
    target: EvaluationTarget,
    settings: RenderSettings,
    episode: int,
    perturbation: Options | None,
    name: str,
) -> Iterator[np.ndarray]:
    # The caption has the target's name, the number of the episode and the perturbation.
    env = target.make_env(1, first=episode)
    total = settings.episodes * settings.rows
    about = f"{name}   " if name else ""
    about += f"episode {episode + 1} of {total}   " if total > 1 else ""
    change = None if perturbation is None else perturb(perturbation, env)
    policies, explore = target.policies, settings.stochastic
    rollout = Rollout(env, policies, perturbation=change, explore=explore)
    return episode_frames(
        rollout,
        about=about + _condition(perturbation),
        head=settings.head if settings.attention else None,
        size=settings.size,
        top=settings.top_patches,
    )


def _without_none(options: Mapping[str, Any] | None) -> Options | None:
    """Replace the configuration ``perturbation=none`` by None."""
    return None if options is None else Options(options).or_none


def _condition(options: Options | None) -> str:
    if options is None:
        return CLEAN
    rest = options.arguments
    severity = rest.pop("severity", None)
    at = "" if severity is None else f"   severity {severity:g}"
    return label(options.name, rest) + at


def _first(env: BatchedEnv) -> BatchedEnv:
    """Copy the first environment with its current state."""
    return env.select(torch.zeros(1, dtype=torch.int64, device=env.device))
