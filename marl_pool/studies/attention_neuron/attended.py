"""Which patches of a picture a policy attends to, as a sheet of frames."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.canvas import opencv
from marl_pool.evaluation.cases import TransferEnv, perturb
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.video.render import Film
from marl_pool.policies.base import Policy
from marl_pool.rollout import Rollout
from marl_pool.studies.attention_neuron.recording import SHUFFLED, blank_tokens
from marl_pool.utils.errors import UnfitTokensError

STEPS = 240
"""After which an episode is cut."""
MOMENTS = 6
TOP = 10
"""Patches outlined, as in the paper's figure."""
SIZE, MARGIN = 240, 8


def draw_attended(
    subject: EvaluationTarget, others: Sequence[TransferEnv], path: Path
) -> None:
    """Draw the most attended patches at some moments of an episode.

    Rows are the episode as it is, the same one shuffled (each patch is drawn where it
    belongs, so that equal rows say that the order does not matter), and the other
    worlds of the evaluation.

    Source: Tang and Ha (2021), Figure 8.

    Raises:
        UnfitTokensError: tokens that are no patches, or a policy without attention.
    """
    env = subject.make_env(1)
    if env.patch_grid is None:
        name = subject.env["name"]
        raise UnfitTokensError(f"expected patches of a picture, which {name} has not")
    _require_attention(subject)
    rows = [
        _row(subject.make_env(1), subject.policies, "clean", shuffled=False),
        _row(subject.make_env(1), subject.policies, "shuffled", shuffled=True),
    ]
    for other in others:
        if not other.missing:
            changed = subject.make_env(1, **other.env)
            rows.append(_row(changed, other.policies, other.label, shuffled=False))
    sheet = _joined([_joined(row, axis=1) for row in rows], axis=0)
    opencv().imwrite(str(path), sheet[..., ::-1])


def _joined(images: Sequence[np.ndarray], *, axis: int) -> np.ndarray:
    """Images of one size in a row or a column, with margins between them."""
    margins = [(0, 0)] * 3
    margins[axis] = (0, MARGIN)
    apart = [np.pad(image, margins, constant_values=255) for image in images]
    return np.concatenate(apart, axis)


def _row(
    env: BatchedEnv, policies: Mapping[str, Policy], about: str, *, shuffled: bool
) -> list[np.ndarray]:
    """Frames at evenly spread moments, captioned."""
    env.max_steps = min(env.max_steps, STEPS)
    change = perturb(SHUFFLED, env) if shuffled else None
    rollout = Rollout(env, policies, perturbation=change)
    frames: list[np.ndarray] = []
    film = Film(rollout, frames.append, about=about, size=SIZE, top=TOP)
    rollout.episodes(on_step=film)
    # The last frame shows how the episode ended: nothing was attended to then.
    transitions = np.linspace(0, len(frames) - 2, MOMENTS).round().astype(int)
    return [frames[transition] for transition in transitions]


def _require_attention(subject: EvaluationTarget) -> None:
    name, policy = next(iter(subject.policies.items()))
    with torch.no_grad():
        if policy.weights(blank_tokens(subject, name)) is None:
            kind = type(policy).__name__
            raise UnfitTokensError(f"expected attention, which {kind} has not")
