"""The report: one page, each number with its provenance, or why it is missing."""

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pandas as pd
import pytest

from helpers.reported import (
    EPISODES,
    SETTINGS,
    Page,
    Reader,
    cell_of,
    cells,
    evaluated,
    frame_of,
    gaps,
    page_of,
    points_of,
    section_of,
    several,
    texts,
    trained,
    with_policy,
    written,
)
from helpers.tables import yaml_cases
from marl_pool.cli import main as cli
from marl_pool.evaluation import report as report_package
from marl_pool.evaluation.report import page, sections
from marl_pool.evaluation.report.evaluated import read_runs
from marl_pool.evaluation.report.frame import ENVIRONMENT, shared_areas
from marl_pool.evaluation.report.html import (
    Cell,
    format_interval,
    format_number,
    join_words,
    score_tone,
)
from marl_pool.evaluation.report.page import report
from marl_pool.evaluation.results import (
    CLEAN,
    DOCUMENT,
    RETURNS,
    read_returns,
    write_returns,
)
from marl_pool.evaluation.statistics.intervals import Interval
from marl_pool.files.figures import line_styles
from marl_pool.files.manifest import sealed_json
from marl_pool.runs.run import Run
from marl_pool.utils.errors import InputError

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REQUIRED = bool(os.environ.get("MARL_POOL_REQUIRE_CHROMIUM"))
"""Whether a missing browser fails the test of the page, instead of skipping it."""

# Pages shared by several tests


@pytest.fixture(scope="module")
def one_seed(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Two heads with one seed each, without saved policies."""
    folder = tmp_path_factory.mktemp("one")
    return page_of(several(folder, ["ada", "max"], 1), folder, videos=True)


@pytest.fixture(scope="module")
def three_seeds(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Two heads with three seeds each."""
    folder = tmp_path_factory.mktemp("three")
    return page_of(several(folder, ["ada", "max"], 3), folder)


@pytest.fixture(scope="module")
def playing(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """Two heads with two seeds each and policies, in an env that is quick to record."""
    folder = tmp_path_factory.mktemp("playing")
    runs = [with_policy(run) for run in several(folder, ["ada", "max"], 2)]
    return page_of(runs, folder, videos=True)


# Numbers


def test_scores_and_areas_by_hand(three_seeds: Page) -> None:
    frame = frame_of(three_seeds.runs[:2])
    expected = {
        ("clean",): [0.8, 0.81],
        # (0.8 + 0.6) / 4 + (0.6 + 0.2) / 4, and the jitter's severities end at 0.2.
        ("area", "occlude", 0.5, 1.0): [0.55, 0.56],
        ("area", "jitter", 0.2): [0.75, 0.76],
        ("level", "occlude", 1.0): [0.2, 0.21],
        ("environment", "more noise"): [0.4, 0.41],
    }
    for condition, points in expected.items():
        assert points_of(frame, *condition) == pytest.approx(points)
    # The luck of the environments cancels, so the seeds' own range is all there is.
    clean = cell_of(frame, "clean")
    np.testing.assert_allclose([clean.score, clean.low, clean.high], [0.805, 0.8, 0.81])
    assert not frame["reason"].any()


def test_without_a_scripted_policy_there_are_returns_and_no_areas(tmp_path):
    frame = frame_of([evaluated(trained(tmp_path / "a"), scripted=False)])
    assert set(frame["unit"]) == {"return"}
    luck = np.random.default_rng(0).normal(size=EPISODES).mean()
    assert points_of(frame, "clean") == pytest.approx([luck - 1.2])
    reason = cell_of(frame, "area", "occlude", 0.5, 1.0).reason
    assert reason.startswith("an area needs scores: returns of both baselines")


def test_several_groups_have_no_scores_and_a_fixed_one_is_missing(tmp_path):
    groups = {"groups": ["fox", "hen"]}
    runs = [
        evaluated(trained(tmp_path / "a", "pooling=ada"), **groups),
        evaluated(trained(tmp_path / "b", "pooling=max"), **groups, fixed=["hen"]),
    ]
    for group, methods in (("hen", {"ada"}), ("fox", {"ada", "max"})):
        frame = frame_of(runs, group)
        assert set(frame["method"]) == methods
        assert set(frame["unit"]) == {"return"}
        reasons = set(frame["reason"][frame["test"] == "area"])
        assert reasons == {"an area needs scores: a single group that learns"}
    html = written([with_policy(run) for run in runs], tmp_path)
    for group in ("fox", "hen"):
        assert f"At a glance ({group})" in html
        assert f"Robustness profiles ({group})" in html
        assert f"As for {group}: Unperturbed, their mean return is" in texts(html)
    assert "Not ranked: no score is defined here" in html
    reason = "the group 'hen' did not learn in its runs"
    assert gaps(html, "overview-group1") == [reason]
    assert f"max: {reason}" in texts(html).replace("&#39;", "'")


def relabel_occlusion(run: Run, label: str, **changes: Any) -> None:
    """Change row labels and evaluation keys, as another version might."""
    document = run.evaluation_dir / DOCUMENT
    content = json.loads(document.read_text()) | changes
    for row in content["results"]:
        if row["perturbation"] == "occlude":
            row["label"] = label
    document.write_text(json.dumps(sealed_json(content)))


def test_conditions_that_only_some_suites_have_are_missing(tmp_path: Path) -> None:
    runs = several(tmp_path, ["ada", "max"], 1)
    relabel_occlusion(runs[1], "occlude among=signal")
    frame, gap = frame_of(runs), "not in the suite of this evaluation"
    for method, label in (("ada", "occlude among=signal"), ("max", "occlude")):
        row = cell_of(frame, "area", label, 0.5, 1.0, method=method)
        assert row.reason == gap
    assert cell_of(frame, "area", "jitter", 0.2).reason == ""


def test_areas_over_other_severities_are_other_numbers(tmp_path: Path) -> None:
    runs = []
    for head, seed, severities in (
        *(("ada", 0, [0.5, 1.0]), ("ada", 1, [0.25, 0.5, 1.0])),
        *(("max", 0, [0.25, 0.5, 1.0]), ("avg", 0, [0.5])),
    ):
        run = trained(tmp_path / f"{head}{seed}", f"pooling={head}", seed=seed)
        runs.append(evaluated(run, severities=severities))
    frame = frame_of(runs)
    short, long = ("area", "occlude", 0.5, 1.0), ("area", "occlude", 0.25, 0.5, 1.0)
    # Over the severities that both seeds met: (0.8 + 0.6) / 4 + (0.6 + 0.2) / 4.
    assert points_of(frame, *short) == pytest.approx([0.55, 0.55])
    reason = "it was measured at other severities: 0.0, 0.5, 1.0"
    assert cell_of(frame, *long).reason == reason
    points = points_of(frame, *long, method="max")
    assert points == pytest.approx([1.55 / 8 + 1.35 / 8 + 0.8 / 4])
    points = points_of(frame, "area", "occlude", 0.5, method="avg")
    assert points == pytest.approx([0.7])
    assert cell_of(frame, *short, method="avg").reason
    # No perturbation counts twice where methods have several of its ladders.
    for methods, ladder in ((["ada", "max"], short), (["max"], long)):
        areas = shared_areas(frame[frame["method"].isin(methods)])
        assert list(areas["severities"].unique()) == [(0.0, *ladder[2:]), (0.0, 0.2)]
    html = written(runs, tmp_path)
    for severities in ("0, 0.5, 1", "0, 0.25, 0.5, 1", "0, 0.5"):
        assert f"occlude ({severities})</th>" in html
    assert "jitter</th>" in html


def test_environments_of_one_label_and_other_options_are_other_conditions(tmp_path):
    runs = []
    for noise in (4, 5):
        transfers = {"more noise": ({"num_noise": noise}, 0.1 * noise)}
        run = trained(tmp_path / f"{noise}", seed=noise)
        runs.append(evaluated(run, transfers=transfers))
    frame = frame_of(runs)
    reasons = frame["reason"][frame["test"] == "environment"]
    assert list(reasons) == ["not in the suite of this evaluation"] * 2


def test_equal_baselines_in_some_resample_leave_no_interval(tmp_path: Path) -> None:
    runs = several(tmp_path, ["ada", "max"], 2)
    for run in runs:
        path = run.evaluation_dir / RETURNS
        returns = read_returns(path)
        # The last two rows of a policy: the scripted one is better in one episode.
        returns[5:] = returns[5:6]
        returns[7:, 0] += 1.0
        write_returns(path.with_name("changed.npz"), returns)
        path.with_name("changed.npz").replace(path)
    clean = cell_of(frame_of(runs), "clean")
    assert clean.score == pytest.approx(0.805 * EPISODES)
    assert np.isnan(clean.low)
    html = written(runs, tmp_path)
    assert not re.search(r"\bnan\b", texts(html))
    reasons = gaps(html, "ranking")
    assert len(reasons) == 2
    assert all("hardly better than the random one" in reason for reason in reasons)


def test_numbers_are_written_to_three_digits_with_a_minus() -> None:
    minus, values = "\N{MINUS SIGN}", (-0.456, -0.001, 12.34, -345.6, np.nan)
    texts = [format_number(value) for value in values]
    assert texts == [f"{minus}0.46", "0.00", "12.3", f"{minus}346", "–"]
    assert format_interval(Interval(0.0, -1.0, 2.0)) == f"{minus}1.00 to 2.00"
    assert format_interval(Interval(0.0, np.nan, np.nan)) == ""
    assert join_words(["a"]) == "a"
    assert join_words(["a", "b", "c"]) == "a, b and c"


def test_shades_depend_on_the_score_alone() -> None:
    shades = [score_tone(score) for score in (-3.0, 0.0, 0.25, 1.0, 7.0, np.nan)]
    assert shades == [0.0, 0.0, 0.25, 1.0, 1.0, None]
    assert Cell("x").style == ""
    assert "rgb(255,255,255);color:#222" in Cell("x", tone=0.0).style
    assert "rgb(0,114,178);color:#fff" in Cell("x", tone=1.0).style
    assert "rgb(230,159,0);color:#222" in Cell("x", tone=-1.0).style


# Transfer between environments


RATIOS = {
    "1-2-3": ({"num_agents": 1, "num_signal": 2, "num_noise": 3}, 0.6),
    "1-2-9": ({"num_agents": 1, "num_signal": 2, "num_noise": 9}, 0.25),
    "8 agents": ({"num_agents": 8}, 0.75),
}
COUNTS = ("env.num_agents=1", "env.num_signal=2")


def heads_of(html: str, section: str) -> list[str]:
    """The headings, and the heads of the tables, rows too, of a section."""
    pattern = r"<(?:h3|th)\b.*?</(?:h3|th)>"
    return list(map(texts, re.findall(pattern, section_of(html, section))))


def test_methods_are_rows_and_test_environments_columns(tmp_path: Path) -> None:
    runs = []
    for head, noise, seed in itertools.product(("ada", "max"), (9, 3), (0, 1)):
        keys = (f"pooling={head}", f"env.num_noise={noise}", *COUNTS)
        run = trained(tmp_path / f"{head}{noise}{seed}", *keys, seed=seed)
        shift = 0.1 * (head == "max") + 0.01 * noise
        runs.append(evaluated(run, transfers=RATIOS, shift=shift))
    html = written(runs, tmp_path)
    names = [f"{head} · num_noise={n}" for n in (9, 3) for head in ("ada", "max")]
    heads = ["method", "unperturbed", "1-2-3", "1-2-9", *names]
    assert heads_of(html, "transfer0") == heads
    numbers = [text.split()[0] for text, _, _ in cells(html, "transfer0")]
    assert numbers[:6] == ["0.89", "0.69", "0.34", "0.99", "0.79", "0.44"]
    assert numbers[6:] == ["0.83", "0.63", "0.28", "0.93", "0.73", "0.38"]
    assert "0.69 0.69 to 0.69" in cells(html, "transfer0")[1][0]
    # Blue says how much of 1 a score is, whatever the other cells hold.
    fragment = section_of(html, "transfer0")
    assert fragment.count("background:rgb(") == 12
    assert heads_of(html, "transfer1") == ["method", "unperturbed", "8 agents", *names]
    # Methods are compared within their environment alone.
    assert html.count("Trained and tested in num_noise=3") >= 3
    assert "drop" not in texts(html)


def test_missing_tokens_in_training_are_rows_of_a_map(tmp_path: Path) -> None:
    lose = ("perturbation=occlude", "perturbation.severity=0.4")
    runs = []
    for head, keys in itertools.product(("ada", "max"), ((), lose)):
        run = trained(tmp_path / f"{head}{len(keys)}", f"pooling={head}", *keys)
        runs.append(evaluated(run, shift=len(keys) / 20))
    html = written(runs, tmp_path)
    methods = ["ada none", "ada occlude", "max none", "max occlude"]
    tested = ["occlude", "method", "unperturbed", "50%", "100%"]
    assert heads_of(html, "occlusion") == [*tested, *methods]
    numbers = [text.split()[0] for text, _, _ in cells(html, "occlusion")[:6]]
    assert numbers == ["0.80", "0.60", "0.20", "0.90", "0.70", "0.30"]


def test_columns_with_equal_headings_are_kept() -> None:
    names = [CLEAN, "far", "unperturbed"]
    rows = pd.DataFrame({"test": [CLEAN, ENVIRONMENT, ENVIRONMENT], "name": names})
    rows = rows.assign(method="ada", condition=range(3), reason=["0", "1", "2"])
    table = sections._map(rows, rows[rows["test"] == ENVIRONMENT])
    assert list(table.columns) == ["method", "unperturbed", "far", "unperturbed"]
    assert [cell.title for cell in table.iloc[0]] == ["", "0", "1", "2"]


# The page


def test_three_sentences_say_what_was_done_and_found(three_seeds: Page) -> None:
    summary = re.search(r'class="summary">(.*?)</p>', three_seeds.html, re.S)
    assert summary
    first, second, third = re.split(r"(?<=[a-z\d)])\. ", summary[1])
    assert first == (
        "6 runs of 2 methods (ada and max) learned simple_centroid, 3 seeds each, and "
        "were tested in 16 episodes per condition, under 2 perturbations and 1 other "
        "environment"
    )
    # Means over both methods and all seeds: 0.8 + 0.05 + 0.01, and so on.
    assert "Unperturbed they score 0.86 on average" in second
    assert "occlude costs most: 0.61 is left" in second
    assert "jitter leaves 0.81" in second
    assert third.startswith("Not ranked: a method has only 3 seeds")


def test_what_was_not_measured_is_not_counted_as_tested(tmp_path: Path) -> None:
    for lost, count in (((0.5,), "2 perturbations"), ((0.5, 1.0), "1 perturbation")):
        folder = tmp_path / f"{len(lost)}"
        html = written([evaluated(trained(folder / "a"), lost=lost)], folder)
        assert f"under {count} and 1 other environment." in texts(html)


def test_under_five_seeds_each_is_shown_and_none_is_ranked(three_seeds: Page) -> None:
    html = three_seeds.html
    reason = "a method has only 3 seeds, and a ranking needs 5"
    assert f"Not ranked: {reason}." in html
    assert not re.search(r"\b[12]\. (ada|max)", texts(html))
    at_a_glance = [text for text, _, _ in cells(html, "overview")]
    assert "0.81 0.80, 0.81, 0.82" in at_a_glance
    # A shade would say which of two methods is better.
    matrix = section_of(html, "improvement")
    assert "background" not in matrix
    assert "1.00 1.00 to 1.00" in texts(matrix)


def test_five_seeds_are_ranked_with_intervals(tmp_path: Path) -> None:
    html = written(several(tmp_path, ["ada", "max"], 5), tmp_path)
    ranking = section_of(html, "ranking")
    assert "Not ranked" not in ranking
    assert texts(ranking).index("1. max") < texts(ranking).index("2. ada")
    assert "Max scores highest, 0.77 (" in html
    assert "followed by ada with 0.67 (" in html


def test_one_seed_holds_for_this_policy_only(one_seed: Page) -> None:
    html = one_seed.html
    assert "this policy only" in html
    reasons = gaps(html, "ranking")
    assert len(reasons) == 2
    assert all("fewer than two seeds" in reason for reason in reasons)
    assert "no interval" in texts(html[html.index('id="improvement"') :])


def test_every_number_has_its_provenance_and_every_missing_value_its_reason(tmp_path):
    runs = several(tmp_path, ["ada", "max"], 2, "env.num_noise=3")
    runs += several(tmp_path, ["ada"], 1, "env.num_noise=9")
    runs = [with_policy(run) for run in runs]
    runs += [trained(tmp_path / "bare", "pooling=cls", "env.num_noise=3")]
    rows = Reader(written(runs, tmp_path)).cells
    assert len(rows) > 60
    sections = {place for place, *_ in rows}
    assert {"overview", "areas", "ranking"} <= sections
    names = "|".join(run.path.name for run in runs)
    file = rf"({names})/(metrics\.csv|config\.yaml|evaluation/\w+(-\d+)?\.json)"
    for section, text, title, kind in rows:
        cell = (section, text, title)
        if kind == "missing":
            assert re.search("[a-z]{2} ", title), cell
        elif re.search(r"\d", text):
            assert re.search(file, title), cell
        if kind != "missing" and "results" in title:
            assert section == "provenance" or "commit 0123abc" in title, cell
            assert section == "provenance" or re.search(r"\d+ episodes", title), cell


def test_provenance_names_commit_configuration_seeds_episodes_and_file(one_seed):
    run, html = one_seed.runs[0], one_seed.html
    provenance = " ".join(text for text, _, _ in cells(html, "provenance"))
    for part in (run.config_digest, "results.json", "iteration 3", "16", "0123abc"):
        assert part in provenance
    # A page may be shared: it does not name the folders above the run.
    assert str(run.path.parent) not in html


def test_files_of_several_commits_are_listed_by_commit(tmp_path: Path) -> None:
    run = evaluated(trained(tmp_path / "a"), severities=[0.5], commit="old")
    evaluated(run, severities=[1.0], commit="new")
    source = "commit new, a/evaluation/results-2.json, commit old, "
    level = cell_of(frame_of([run]), "level", "occlude", 0.5)
    assert f"{source}a/evaluation/results.json" in level.provenance
    html = written([run], tmp_path)
    assert "new, old" in [text for text, *_ in cells(html, "provenance")]
    # The unperturbed rows come from the newer file.
    assert (
        "a/evaluation/results-2.json, commit new, 16" in cells(html, "overview")[2][1]
    )


def test_a_name_that_is_no_utf8_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "bad\udcff"
    runs = [evaluated(trained(folder)), evaluated(trained(tmp_path / "b", seed=1))]
    runs[0].metrics_path.unlink()
    assert "bad\\udcff: no return_mean" in texts(written(runs, tmp_path, videos=True))


def test_what_is_missing_is_listed_with_its_reason(tmp_path: Path) -> None:
    complete = evaluated(trained(tmp_path / "a"))
    incomplete = evaluated(trained(tmp_path / "part", seed=1), lost=[0.5])
    # Without one level there is no area.
    frame = frame_of([complete, incomplete])
    for lost in (("area", "occlude", 0.5, 1.0), ("level", "occlude", 0.5)):
        assert cell_of(frame, *lost).reason == "a reason"
    assert cell_of(frame, "level", "occlude", 1.0).reason == ""
    bare = trained(tmp_path / "b", "pooling=max")
    html = written([complete, incomplete, bare], tmp_path)
    section = texts(html[html.index('id="missing"') :])
    assert "b: not evaluated yet" in section
    assert "occlude: a reason" in section
    assert "1 without an evaluation" in html


def test_runs_without_any_evaluation_have_learning_curves(tmp_path: Path) -> None:
    html = written([trained(tmp_path / "a"), trained(tmp_path / "b", seed=1)], tmp_path)
    assert html.count("<svg") == 1
    assert "None of them has a comparable evaluation" in html
    assert "not evaluated yet" in html


def test_nothing_is_fetched(three_seeds: Page) -> None:
    html = three_seeds.html
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html
    assert not re.findall(r'(?:src|href)="(?!data:|#)', html)
    assert not re.findall(r"url\((?!#)", html)
    svgs = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(svgs) >= 3
    ids = [name for svg in svgs for name in re.findall(r' id="([^"]+)"', svg)]
    assert not [name for name in ids if re.fullmatch(r"[a-z]+[0-9a-z]*_\d+", name)]


HOSTILE = "$\\foo{$<script>\"'&amp;--><b onload=x>"


def test_names_are_shown_as_they_are_whatever_they_hold(tmp_path: Path) -> None:
    runs = []
    options = {"groups": [f"fox {HOSTILE}", f"hen {HOSTILE}"]}
    options |= {"transfers": {f"env {HOSTILE}": ({HOSTILE: 9}, 0.4)}}
    for place, head in enumerate(("ada", "max")):
        run = trained(tmp_path / f"{HOSTILE}{place}", f"pooling={head}")
        runs.append(evaluated(run, **options))
        # Any key may tell methods apart.
        run.write_config({**run.config, "mark": f"{HOSTILE}{run.path.name[-1]}"})
        run.metrics_path.unlink()
        relabel_occlusion(run, f"occlude {HOSTILE}", commit=HOSTILE)
    html = written(runs, tmp_path)
    reader = Reader(html)
    assert not reader.tags & {"script", "b"}
    assert not [name for name in reader.attributes if name.startswith("on")]
    prefixes = ("", "mark=", "fox ", "hen ", "env ", "occlude ", "Other environments: ")
    for prefix in prefixes:
        assert f"{prefix}{HOSTILE}" in reader.text, prefix
    assert f"{HOSTILE}0 and {HOSTILE}1: no return_mean" in reader.text
    # In a picture, too, where a dollar would begin a formula.
    (picture,) = re.findall(r"<svg.*?</svg>", html, re.S)[1:2]
    assert escape(f"occlude {HOSTILE}"[:12], quote=False) in picture


def test_an_existing_file_is_left_alone(tmp_path: Path, monkeypatch) -> None:
    runs = [trained(tmp_path / "a")]
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(InputError, match=r"page\.html exists; choose another --out"):
        written(runs, tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InputError, match=f"{tmp_path}/page.html exists"):
        report(runs, "~/page.html", SETTINGS)
    assert (tmp_path / "page.html").read_text() == "mine"


def test_pages_without_a_name_stand_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = [trained(tmp_path / "a")]

    class Stopped(page.datetime):
        """A stopped clock."""

        @classmethod
        def now(cls, tz: Any = None) -> page.datetime:
            return page.datetime(2030, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(page, "datetime", Stopped)
    paths = [report(runs, None, SETTINGS) for _ in range(2)]
    stem = "reports/20300102-030405-simple_centroid"
    assert paths == [Path(f"{stem}.html"), Path(f"{stem}-2.html")]


# Videos of policies


def videos_in(html: str) -> list[bytes]:
    sources = re.findall(r'src="data:video/webm;base64,([^"]+)"', html)
    return [base64.b64decode(data) for data in sources]


def test_videos_show_clean_and_perturbed_side_by_side(playing, tmp_path):
    html = playing.html
    # One for each method; the perturbation is the one that costs most.
    assert html.count("<b>unperturbed</b><b>occlude 1</b>") == 2
    videos = videos_in(html)
    assert len(videos) == 2
    (tmp_path / "film.webm").write_bytes(videos[0])
    capture = cv2.VideoCapture(str(tmp_path / "film.webm"))
    images = []
    while (frame := capture.read())[0]:
        images.append(frame[1].astype(int))
    # Of seven frames every second one.
    assert len(images) == 4
    width = images[0].shape[1]
    assert width > 2 * images[0].shape[0] * 0.7
    half = (width - 6) // 2
    clean, perturbed = images[-1][:, :half], images[-1][:, -half:]
    assert np.abs(clean - perturbed).max() > 100
    assert len(videos[0]) < 300_000


def test_a_policy_that_cannot_be_read_is_a_missing_value(one_seed: Page) -> None:
    assert not videos_in(one_seed.html)
    assert "has no policy &#39;best&#39;" in one_seed.html


# The command


def test_the_command_evaluates_what_is_missing(tmp_path, capsys):
    runs = [evaluated(trained(tmp_path / "0")), trained(tmp_path / "1", seed=1)]
    with_policy(runs[1])
    out = tmp_path / "page.html"
    words = ["report", *(str(run.path) for run in runs), "--out", str(out)]
    keys = ["suite=quick", "threads=1", "videos=false"]
    first = ["report", str(runs[1].path), "--out", str(tmp_path / "first.html")]
    assert cli.main([*first, "videos=false"]) == 0
    error = capsys.readouterr().err
    assert str(runs[1].path) in error
    assert "evaluate=true" in error
    assert cli.main([*words, "evaluate=true", *keys]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert all(source.evaluation for source in read_runs(runs))
    assert "tested in 16 episodes per condition" in out.read_text()
    assert not list(runs[0].evaluation_dir.glob("results-2*"))


def test_the_command_evaluates_a_run_as_the_others_were(tmp_path, capsys):
    runs = [with_policy(trained(tmp_path / f"{s}", seed=s)) for s in (0, 1)]
    first, second = (str(run.path) for run in runs)
    options = ["episodes=4", "seed=3", "env.num_noise=2", "stochastic=true"]
    options += ["perturbations=[{name: jitter, scale: 0.2, severities: [0.5, 1]}]"]
    options += ["transfer=[{label: more, env: {num_noise: 5}, rescale_codes: true}]"]
    assert cli.main(["evaluate", first, *options]) == 0
    words = ["report", first, second, "evaluate=true", "videos=false"]
    # Another protocol could not be compared: it is refused before hours are spent.
    assert cli.main([*words, "episodes=8"]) == 2
    error = capsys.readouterr().err
    assert "episodes: expected 4, " in error
    assert "got 8" in error
    assert cli.main([*words, "--out", str(tmp_path / "page.html")]) == 0
    reference, evaluation = (source.evaluation for source in read_runs(runs))
    assert reference
    assert evaluation
    assert sorted(reference.rows["key"]) == sorted(evaluation.rows["key"])
    assert "without an evaluation" not in (tmp_path / "page.html").read_text()


def test_the_command_says_why_an_evaluation_cannot_be_used(tmp_path, capsys):
    run = evaluated(trained(tmp_path / "a"))
    (run.evaluation_dir / "results.json").write_text("")
    words = ["report", str(run.path), "videos=false", "--out", str(tmp_path / "p.html")]
    assert cli.main(words) == 0
    error = capsys.readouterr().err
    assert f"{run.path}: no evaluation with each episode's return" in error
    assert "results.json" in error


@yaml_cases("keys, message")
def test_a_wrong_command_is_refused_in_one_line(tmp_path, refused, keys, message):
    run = trained(tmp_path / "a")
    (tmp_path / "here.html").touch()
    words = keys.format(folder=tmp_path, long="x" * 300).split()
    assert message in refused("report", str(run.path), *words)


def test_without_pandas_the_command_names_the_extra(tmp_path, refused, monkeypatch):
    run = trained(tmp_path / "a")
    monkeypatch.delattr(report_package, "page")
    for name in list(sys.modules):
        if name.startswith("marl_pool.evaluation.report."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert 'pandas: pip install "marl-pool[plots]"' in refused("report", str(run.path))


# In a browser


PROBE = """
<script>
addEventListener("load", () => {
  const films = [...document.querySelectorAll("video")];
  const probe = document.createElement("pre");
  probe.id = "probe";
  const write = () => {
    probe.textContent = JSON.stringify({
      fetched: performance.getEntriesByType("resource").map(r => r.name.slice(0, 40)),
      films: films.map(f => [f.videoWidth, f.error && f.error.message]),
      wide: document.documentElement.scrollWidth - innerWidth,
      figures: [...document.querySelectorAll("svg")].map(s => s.clientHeight),
    });
    document.body.append(probe);
  };
  Promise.all(films.map(f => f.readyState ? 0 : new Promise(
    done => { f.onloadedmetadata = f.onerror = done; f.load(); }
  ))).then(write);
});
</script>
"""


def browse(folder: Path, file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM, "chromium is required here, and there is none"
    return subprocess.run(
        [
            *(CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu"),
            *("--disable-background-networking", "--disable-component-update"),
            *("--no-first-run", "--enable-logging=stderr", "--hide-scrollbars"),
            *("--disable-dev-shm-usage", "--virtual-time-budget=10000"),
            *(f"--user-data-dir={folder / 'profile'}", "--window-size=1100,3000"),
            *flags,
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM or REQUIRED), reason="no chromium here")
def test_a_browser_shows_it_without_network_or_complaint(playing, tmp_path):
    html, file, picture = playing.html, tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(html, encoding="utf-8")
    process = browse(tmp_path, file, f"--screenshot={picture}")
    assert "CONSOLE" not in process.stderr, process.stderr
    image = cv2.imread(str(picture))
    assert image is not None
    assert image.shape == (3000, 1100, 3)
    # It is not blank, and shows the first method's color.
    assert (image < 80).all(-1).mean() > 0.005
    assert (np.abs(image.astype(int) - (0xB2, 0x72, 0x00)).max(-1) < 8).sum() > 500
    # The same page with a script that inspects it.
    probed = tmp_path / "probed.html"
    policy = "default-src 'none'; "
    assert policy in html
    opened = html.replace(policy, policy + "script-src 'unsafe-inline'; ")
    probed.write_text(opened.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    probing = browse(tmp_path, probed, "--dump-dom")
    match = re.search(r'<pre id="probe">(.*?)</pre>', probing.stdout, re.S)
    assert match, probing.stderr
    probe = json.loads(match[1].replace("&amp;", "&"))
    assert [name for name in probe["fetched"] if not name.startswith("data:")] == []
    assert [error for _, error in probe["films"]] == [None, None]
    assert all(width > 400 for width, _ in probe["films"])
    assert probe["wide"] <= 0
    assert min(probe["figures"]) > 50


def test_seeds_without_common_training_have_no_mean_curve() -> None:
    def run(name: str, first: int) -> Any:
        steps = range(first, first + 3)
        metrics = pd.DataFrame({"env_steps": steps, "return_mean": [1.0, 2.0, 3.0]})
        return SimpleNamespace(
            name=name,
            metrics=metrics,
            metrics_missing="",
            run=SimpleNamespace(metrics_path=Path(name)),
            relative=str,
        )

    methods = [
        SimpleNamespace(kind=kind, env=env, runs=[run(f"{env}{i}", i) for i in starts])
        for kind, env, starts in (
            ("ada", "a", (0, 1)),
            ("ada", "b", (10, 40)),
            ("ada", "c", (50, 90)),
        )
    ]
    section = sections.learning_curves(methods, line_styles(["ada"]))
    text = " ".join(map(str, section.components))
    assert "b10, b40, c50 and c90: no training in common." in text
