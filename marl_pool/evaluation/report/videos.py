"""Videos of the policies, unperturbed and perturbed episodes side by side."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.report.components import Component, Note, PageSection, Video
from marl_pool.evaluation.report.group_scores import GroupScores
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.runs import Loaded, load_problem
from marl_pool.evaluation.report.table import UNPERTURBED, Condition
from marl_pool.evaluation.results import CLEAN
from marl_pool.evaluation.video.render import episode_frames
from marl_pool.evaluation.video.tiling import grid_frames
from marl_pool.evaluation.video.webm import write_webm
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError

SIZE, FPS, SECONDS = 288, 12, 5
EVERY = 2
"""Steps from one frame to the next, so that a page with many videos stays small."""


def videos(
    methods: Sequence[Method],
    loaded: Loaded,
    group: GroupScores | None,
    name: str,
) -> PageSection:
    """Build the section of videos, one of the first seed of each method.

    Args:
        methods: in order.
        loaded: from `load_policies`.
        group: the scores of the group, which choose the perturbation; None without an
            evaluation.
        name: of the group of agents.
    """
    condition = _most_harmful(group)
    perturbation, about = None, ""
    if group is not None and condition is not None:
        row = group.row(condition)
        given = {"name": row["perturbation"], "severity": row["severity"]}
        perturbation = {**row["options"], **given}
        about = f"{condition.label} {condition.severity:g}"
    components: list[Component] = []
    for method in methods:
        one = method.runs[0]
        subject = loaded[one.run.path]
        caption = f"{method.name}, training seed {one.seed}"
        problem = load_problem(subject, name)
        if problem or isinstance(subject, str):
            components.append(Note(f"{caption}: {problem}", missing=True))
            continue
        try:
            data = side_by_side(subject, perturbation, about, name)
        except (InputError, ModuleNotFoundError) as error:
            why = f"{caption}: no video: {one.without_folders(error)}"
            components.append(Note(why, missing=True))
            continue
        columns = ["unperturbed", about] if about else ["unperturbed"]
        title = f"{one.name}, checkpoint {subject.name}"
        components.append(Video(data, columns, caption, title))
    return PageSection("videos", components, {"perturbation": about})


def _most_harmful(group: GroupScores | None) -> Condition | None:
    """The level with the lowest mean score, of those common to all methods.

    The first one, if none is lower than the unperturbed score.
    """
    if group is None or not group.measured:
        return None
    measured = group.measured

    def mean(one: Condition) -> float:
        return float(np.mean([own.mean(one).value for own in measured]))

    levels = [one for one in group.common(measured, "level") if one.severity]
    if not levels:
        return None
    worst = min(levels, key=mean)
    return worst if mean(worst) < mean(UNPERTURBED) else levels[0]


def side_by_side(
    subject: EvaluationTarget,
    perturbation: Mapping[str, Any] | None,
    about: str,
    group: str,
) -> str:
    """Record the first evaluation environment twice, in one video that keeps in step.

    Args:
        subject: the policy and its environments.
        perturbation: ``{"name": …, "severity": …, **options}``; None for clean alone.
        about: the perturbation in words.
        group: of agents, whose return and attention are drawn.

    Returns:
        WebM in base64.

    Raises:
        InputError: an environment that cannot be drawn, or no OpenCV that writes VP9.
    """
    tiles = [_tile(subject, None, CLEAN, group)]
    if perturbation is not None:
        tiles.append(_tile(subject, perturbation, about, group))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "video.webm"
        write_webm(path, islice(grid_frames([tiles]), 0, None, EVERY), FPS)
        return base64.b64encode(path.read_bytes()).decode()


def _tile(
    subject: EvaluationTarget,
    perturbation: Mapping[str, Any] | None,
    about: str,
    group: str,
) -> Iterator[np.ndarray]:
    env = subject.make_env(1)
    env.max_steps = min(env.max_steps, FPS * SECONDS * EVERY - EVERY)
    change = None if perturbation is None else perturb(perturbation, env)
    rollout = Rollout(env, subject.policies, perturbation=change)
    return episode_frames(rollout, about=about, size=SIZE, group=group)
