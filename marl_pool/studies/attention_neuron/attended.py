"""Sheets of frames with the most attended patches."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from marl_pool.envs.base import BatchedEnv
from marl_pool.envs.drawing.canvas import opencv
from marl_pool.evaluation.cases import TransferEnv
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.video.render import episode_frames
from marl_pool.policies.base import Policy
from marl_pool.studies.attention_neuron.recording import blank_tokens, make_rollout
from marl_pool.utils.errors import UnfitTokensError

STEPS = 240
"""Steps after which an episode is cut."""
FRAMES = 6
"""Frames of an episode."""
TOP = 10
"""Patches outlined, as in the paper's figure."""
SIZE, MARGIN = 240, 8


def draw_attended(
    target: EvaluationTarget, transfers: Sequence[TransferEnv], path: Path
) -> None:
    """Draw the most attended patches at evenly spread steps of an episode.

    Rows are the unperturbed episode, the same one shuffled, and the transfer
    environments of the evaluation. Patches are drawn at their original places, so that
    the first two rows are equal if the order does not matter.

    Source: Tang and Ha (2021, https://arxiv.org/abs/2109.02869), Figure 8.

    Raises:
        UnfitTokensError: tokens that are not patches, or a policy without attention.
    """
    # Only patches can be drawn on a picture.
    if target.make_env(1).patch_grid is None:
        name = target.env["name"]
        raise UnfitTokensError(f"expected patches of a picture, which {name} has not")
    _validate_attention(target)
    # Each row is an episode.
    rows = [
        _row(target.make_env(1), target.policies, "clean"),
        _row(target.make_env(1), target.policies, "shuffled", shuffled=True),
        *(
            _row(target.make_env(1, **each.env), each.policies, each.label)
            for each in transfers
            if not each.missing
        ),
    ]
    # Join the rows to one sheet.
    sheet = _joined([_joined(row, axis=1) for row in rows], axis=0)
    opencv().imwrite(str(path), sheet[..., ::-1])


def _joined(images: Sequence[np.ndarray], *, axis: int) -> np.ndarray:
    """Join images of one size along an axis, with margins between them."""
    margins = [(0, 0)] * 3
    margins[axis] = (0, MARGIN)
    apart = [np.pad(image, margins, constant_values=255) for image in images]
    return np.concatenate(apart, axis)


def _row(
    env: BatchedEnv, policies: Mapping[str, Policy], about: str, shuffled: bool = False
) -> list[np.ndarray]:
    """Return captioned frames at evenly spread steps."""
    rollout = make_rollout(env, policies, shuffled, STEPS)
    frames = list(episode_frames(rollout, about=about, size=SIZE, top=TOP))
    # The last frame shows the end of the episode, without attention.
    steps = np.linspace(0, len(frames) - 2, FRAMES).round().astype(int)
    return [frames[step] for step in steps]


def _validate_attention(target: EvaluationTarget) -> None:
    name, policy = next(iter(target.policies.items()))
    with torch.no_grad():
        if policy.attention_weights(blank_tokens(target, name)) is None:
            kind = type(policy).__name__
            raise UnfitTokensError(f"expected attention, which {kind} has not")
