"""Videos of the policies, unperturbed and perturbed episodes side by side."""

import base64
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from markupsafe import Markup

from marl_pool.evaluation.cases import perturb
from marl_pool.evaluation.report import html
from marl_pool.evaluation.report.evaluated import ReportedRun, load
from marl_pool.evaluation.report.frame import shared
from marl_pool.evaluation.report.methods import Method
from marl_pool.evaluation.results import CLEAN
from marl_pool.evaluation.target import EvaluationTarget
from marl_pool.evaluation.video.frames import grid_frames, with_steps, write_frames
from marl_pool.evaluation.video.render import LEGEND_ROWS, episode_frames
from marl_pool.rollout import Rollout
from marl_pool.utils.errors import InputError

SIZE, FPS, SECONDS = 288, 12, 5
EVERY = 2
"""Steps between frames: a page with many videos stays small."""
VIDEO = Markup(
    '<figure title="{}"><figcaption>{}</figcaption><div class="columns">{}</div>'
    '<video controls loop muted playsinline preload="metadata" '
    'src="data:video/webm;base64,{}"></video></figure>'
)


def videos(
    methods: Sequence[Method],
    groups: Mapping[str, pd.DataFrame],
    plugins: Collection[str],
) -> list[html.PageSection]:
    """Build a section for each group, with a video of each method's first seed.

    The scores of a group decide which perturbation is shown. Without an evaluation, the
    groups are those that were trained. ``plugins`` are names that the runs' files may
    use.
    """
    loaded = {
        method.name: (method.runs[0], load(method.runs[0], plugins))
        for method in methods
    }
    names: Collection[str] = groups or dict.fromkeys(
        group
        for _, target in loaded.values()
        if isinstance(target, EvaluationTarget)
        for group in target.policies
        if group not in target.fixed
    )
    return html.label_groups(
        {name: [_section(loaded, groups.get(name), name)] for name in names}
    )


def _section(
    loaded: Mapping[str, tuple[ReportedRun, EvaluationTarget | str]],
    rows: pd.DataFrame | None,
    group: str,
) -> html.PageSection:
    # Show the most harmful perturbation beside the unperturbed episode.
    perturbation, label, columns = None, "", [Markup("<b>unperturbed</b>")]
    worst = None if rows is None else _most_harmful(rows)
    if worst is not None:
        level = {"name": worst["perturbation"], "severity": worst["level"]}
        perturbation = {**worst["options"], **level}
        label = f"{worst['label']} {worst['level']:g}"
        columns.append(Markup("<b>{}</b>").format(label))
    section = html.PageSection("videos", facts={"perturbation": label})
    # Render the first seed of each method, or say why that is impossible.
    for method, (run, target) in loaded.items():
        caption = f"{method}, training seed {run.seed}"
        try:
            if isinstance(target, str):
                raise InputError(target)
            if group in target.fixed:
                raise InputError(f"the group {group!r} did not learn in this run")
            data = _side_by_side(target, perturbation, label, group)
        except (InputError, ModuleNotFoundError) as error:
            reason = f"{caption}: no video: {run.without_folders(error)}"
            section.components.append(html.missing_note(reason))
            continue
        title = f"{run.name}, checkpoint {target.name}"
        video = VIDEO.format(title, caption, Markup().join(columns), data)
        section.components.append(video)
    return section


def _most_harmful(rows: pd.DataFrame) -> pd.Series | None:
    """Return a row of the level with the lowest mean score that all methods share.

    If none is lower than the unperturbed score, the first level is taken.
    """
    levels = shared(rows[rows["level"] > 0])
    if levels.empty:
        return None
    means = levels.groupby("condition", sort=False)["score"].mean()
    harmful = means.min() < rows["score"][rows["test"] == CLEAN].mean()
    condition = means.idxmin() if harmful else means.index[0]
    return levels[levels["condition"] == condition].iloc[0]


def _side_by_side(
    target: EvaluationTarget,
    perturbation: Mapping[str, Any] | None,
    label: str,
    group: str,
) -> str:
    """Record the first evaluation environment, clean and perturbed, as WebM in base64.

    Raises:
        InputError: an environment that cannot be drawn, or no OpenCV that writes WebM.
    """
    rows = 0 if perturbation is None else LEGEND_ROWS
    frames = partial(
        episode_frames, size=SIZE, group=group, steps=False, legend_rows=rows
    )
    columns = [(CLEAN, None), (label, perturbation)]
    # All columns play the same environment, step by step.
    tiles = []
    for words, options in columns if perturbation is not None else columns[:1]:
        env = target.make_env(1)
        env.max_steps = min(env.max_steps, FPS * SECONDS * EVERY - EVERY)
        change = None if options is None else perturb(options, env)
        rollout = Rollout(env, target.policies, perturbation=change)
        tiles.append(frames(rollout, text=words))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "video.webm"
        images = with_steps(grid_frames([tiles]))
        write_frames(path, islice(images, 0, None, EVERY), FPS)
        return base64.b64encode(path.read_bytes()).decode()
