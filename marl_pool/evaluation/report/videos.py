"""Videos of the policies, unperturbed and perturbed episodes side by side."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from markupsafe import Markup

from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.loading import EvaluationTarget
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.group_scores import (
    UNPERTURBED,
    Condition,
    GroupScores,
)
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.report.runs import Loaded, with_trained
from marl_pool.evaluation.results import CLEAN
from marl_pool.evaluation.video.render import episode_frames
from marl_pool.evaluation.video.tiling import grid_frames
from marl_pool.evaluation.video.webm import write_webm
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError

SIZE, FPS, SECONDS = 288, 12, 5
EVERY = 2
"""Steps from one frame to the next, so that a page with many videos stays small."""
VIDEO = Markup(
    '<figure title="{}"><figcaption>{}</figcaption><div class="columns">{}</div>'
    '<video controls loop muted playsinline preload="metadata" '
    'src="data:video/webm;base64,{}"></video></figure>'
)


def videos(
    methods: Sequence[Method], loaded: Loaded, group: GroupScores | None, name: str
) -> html.PageSection:
    """Build the section of videos, one of the first seed of each method.

    Args:
        methods: in order.
        loaded: from `load_policies`.
        group: the scores of the group, which choose the perturbation; None without an
            evaluation.
        name: of the group of agents.
    """
    # The perturbation that costs most is shown beside the unperturbed episode.
    perturbation, about, columns = None, "", [Markup("<b>unperturbed</b>")]
    if group and (condition := _most_harmful(group)):
        row = group.row(condition)
        given = {"name": row["perturbation"], "severity": row["severity"]}
        perturbation = {**row["options"], **given}
        about = f"{condition.label} {condition.severity:g}"
        columns.append(Markup("<b>{}</b>").format(about))
    section = html.PageSection("videos", facts={"perturbation": about})
    # Render the first seed of each method, or say why that is impossible.
    for method in methods:
        one = method.runs[0]
        caption = f"{method.name}, training seed {one.seed}"
        subject = with_trained(loaded[one.run.path], name)
        if isinstance(subject, str):
            section.components.append(html.missing_note(f"{caption}: {subject}"))
            continue
        try:
            data = side_by_side(subject, perturbation, about, name)
        except (InputError, ModuleNotFoundError) as error:
            reason = f"{caption}: no video: {one.without_folders(error)}"
            section.components.append(html.missing_note(reason))
            continue
        title = f"{one.name}, checkpoint {subject.name}"
        video = VIDEO.format(title, caption, Markup().join(columns), data)
        section.components.append(video)
    return section


def _most_harmful(group: GroupScores) -> Condition | None:
    """The level with the lowest mean score, of those common to all methods.

    The first one, if none is lower than the unperturbed score.
    """
    levels = [one for one in group.common(group.measured, "level") if one.severity]
    worst = min(levels, key=group.mean, default=UNPERTURBED)
    harmful = group.mean(worst) < group.mean(UNPERTURBED)
    return worst if harmful else next(iter(levels), None)


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
    # Both columns play the same environment, step by step.
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
