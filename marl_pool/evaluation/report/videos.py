"""Short videos of a policy, clean and perturbed side by side in the same world."""

import base64
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.grid import Tile, frames_of
from marl_pool.evaluation.results import CLEAN
from marl_pool.evaluation.subject import Subject
from marl_pool.evaluation.video import Film
from marl_pool.evaluation.webm import Writer
from marl_pool.rollout import Rollout

SIZE, FPS, SECONDS = 288, 12, 5
EVERY = 2
"""Steps from one frame to the next: a page with many videos stays small."""


def side_by_side(
    subject: Subject, perturbation: Mapping[str, Any] | None, about: str, group: str
) -> str:
    """Film the first evaluation world twice and put both into one video.

    One file keeps the two in step.

    Args:
        subject: the policy and its worlds.
        perturbation: ``{"name": …, "severity": …, **options}``; None for clean alone.
        about: the perturbation in words.
        group: whose return is counted and attention drawn.

    Returns:
        WebM in base64.

    Raises:
        InputError: a world that cannot be drawn, or no OpenCV that writes VP9.
    """
    tiles = [_tile(subject, None, CLEAN, group)]
    if perturbation is not None:
        tiles.append(_tile(subject, perturbation, about, group))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "film.webm"
        with Writer(path, FPS) as writer:
            for image in islice(frames_of([tiles]), 0, None, EVERY):
                writer.write(image)
        return base64.b64encode(path.read_bytes()).decode()


def _tile(
    subject: Subject, perturbation: Mapping[str, Any] | None, about: str, group: str
) -> Tile:
    world = subject.worlds(1)
    world.max_steps = min(world.max_steps, FPS * SECONDS * EVERY - EVERY)
    change = None if perturbation is None else perturb(perturbation, world)
    rollout = Rollout(world, subject.policies, perturbation=change)
    frames: deque[np.ndarray] = deque()
    film = Film(rollout, frames.append, about=about, size=SIZE, group=group)
    return Tile(rollout.moments(), film, frames)
