"""The report: one page, each number with its origin, each gap with its reason."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import ArrayLike

from marl_pool import cli
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.errors import InputError
from marl_pool.evaluation.report import page
from marl_pool.evaluation.report.blocks import Cell, listed, number, shaded, span
from marl_pool.evaluation.report.methods import methods_of
from marl_pool.evaluation.report.page import report
from marl_pool.evaluation.report.sources import not_evaluated, read_sources
from marl_pool.evaluation.report.study import AS_IS, Condition, Study
from marl_pool.evaluation.results import (
    DOCUMENT,
    RETURNS,
    Files,
    Result,
    write_json,
    write_returns,
)
from marl_pool.evaluation.statistics import Interval
from marl_pool.policies import make_policy
from marl_pool.policies.storage import save_policies
from marl_pool.runs import Run

EPISODES = 16
SMALL = ("env.max_steps=6", "env.num_noise=3", "encoder.num_layers=1")
SETTINGS: dict[str, Any] = {"videos": False, "evaluate": False, "threads": 1}
LADDER = {0.0: 0.8, 0.5: 0.6, 1.0: 0.2}
"""Scores under occlusion."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


# A factory of runs


def trained(path: Path, *overrides: str, seed: int = 0, rows: int = 5) -> Run:
    """A run with learning curves; its policy is not there."""
    run = Run.create(path, compose("train", [*SMALL, *overrides, f"seed={seed}"]))
    lines = ["iteration,env_steps,return_mean", "1,64,"]
    lines += [f"{k},{64 * k},{-3 / k - 0.1 * seed}" for k in range(2, 2 + rows)]
    run.metrics_path.write_text("\n".join(lines) + "\n")
    return run


def with_policy(run: Run) -> Run:
    config = run.config
    group = make_batched_env(num_envs=1, **config["env"]).groups["agent"]
    parts = {"encoder": config["encoder"], "pooling": config["pooling"]}
    policy = make_policy(group.tokens, group.action_space, **parts, seed=1)
    with run.save_policy_dir() as folder:
        save_policies({"agent": policy}, {"agent": "agent"}, folder)
    return run


def evaluated(
    run: Run,
    *,
    shift: float = 0.0,
    episodes: int = EPISODES,
    lost: Sequence[float] = (),
    scripted: bool = True,
    groups: Sequence[str] = ("agent",),
    **about: Any,
) -> Run:
    """Write an evaluation whose scores are `LADDER`'s, plus ``shift``.

    Returns are -2 for the random policy and -1 for the scripted one, in every world
    plus that world's own luck, which cancels in scores.
    """
    luck = np.random.default_rng(0).normal(size=episodes)
    results: list[Result] = []
    table: list[np.ndarray] = []

    def add(level: float, **row: Any) -> None:
        for group in groups:
            given = {"policy": "trained", "stochastic": False, **row}
            results.append(Result(group=group, **given))
            missing = np.full(episodes, np.nan)
            table.append(missing if row.get("gap") else level - 2 + luck)

    clean = {"perturbation": "clean", "label": "clean", "severity": 0.0}
    add(LADDER[0.0] + shift, **clean)
    for severity in (0.5, 1.0):
        gap = "a reason" if severity in lost else ""
        occlude = {"perturbation": "occlude", "label": "occlude", "severity": severity}
        add(LADDER[severity] + shift, **occlude, gap=gap)
    jitter = {"perturbation": "jitter", "label": "jitter", "severity": 0.2}
    add(0.7 + shift, **jitter, options={"features": None})
    others = {"perturbation": "world", "label": "more noise", "severity": 0.0}
    others["world"] = {"num_noise": 9}
    add(0.4 + shift, **others)
    for policy, level in (("random", 0.0), ("heuristic", 1.0)):
        if policy == "random" or scripted:
            add(level, policy=policy, **clean)
            add(level, policy=policy, **others)
    files = Files(run.evaluation_dir)
    told: dict[str, Any] = {
        **{"run": run.path.name, "env": run.config["env"], "changed": {}, "seed": 0},
        **{"checkpoint": "best", "iteration": 3, "episodes": episodes},
        **{"commit": "0123abc", "package_version": "9"},
    }
    write_json(files.path(DOCUMENT), results, {**told, **about})
    write_returns(files.path(RETURNS), np.stack(table))
    return run


def several(folder: Path, heads: Sequence[str], seeds: int, *keys: str) -> list[Run]:
    """Runs of some heads; each is better by 0.1, and each seed by 0.01."""
    mark = "".join(key.partition("=")[2] for key in keys)
    return [
        evaluated(
            trained(
                folder / f"{head}{mark}-{seed}", f"pooling={head}", *keys, seed=seed
            ),
            shift=0.1 * place + 0.01 * seed,
        )
        for place, head in enumerate(heads)
        for seed in range(seeds)
    ]


def study_of(runs: Sequence[Run]) -> Study:
    return Study(methods_of(read_sources(runs)), "agent")


def written(runs: Sequence[Run], folder: Path, **settings: Any) -> str:
    path = report(runs, str(folder / "page.html"), {**SETTINGS, **settings})
    return path.read_text(encoding="utf-8")


class _Cells(HTMLParser):
    """The cells of each section: text, title, class."""

    def __init__(self) -> None:
        super().__init__()
        self.section, self.cells = "", []  # type: ignore[var-annotated]
        self.inside = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "section":
            self.section = given["id"] or ""
        if tag == "td":
            self.inside = True
            self.cells.append(
                [self.section, "", given.get("title"), given.get("class")]
            )

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.cells[-1][1] += data + " "


def cells(html: str, section: str) -> list[tuple[str, str, str]]:
    parser = _Cells()
    parser.feed(html)
    return [
        (text.strip(), title or "", kind or "")
        for place, text, title, kind in parser.cells
        if place == section
    ]


def texts(html: str) -> str:
    """What a reader sees, in one line."""
    return " ".join(
        re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", html, flags=re.S).split()
    )


# Which evaluation counts


def test_the_newest_complete_evaluation_counts(tmp_path: Path) -> None:
    run = evaluated(evaluated(trained(tmp_path / "a")), shift=0.1)
    # A third one that was cut off, a fourth without returns, and one of ten.
    (run.evaluation_dir / "results-3.json").write_text('{"results": [')
    shutil.copy(run.evaluation_dir / DOCUMENT, run.evaluation_dir / "results-10.json")
    (source,) = read_sources([run])
    assert source.evaluation is not None
    assert source.evaluation.path.name == "results-2.json"
    assert source.evaluation.returns.shape == (9, EPISODES)


def test_a_run_without_an_evaluation_says_how_to_make_one(tmp_path: Path) -> None:
    first = evaluated(trained(tmp_path / "a"))
    second = trained(tmp_path / "b", seed=1)
    _, source = read_sources([first, second])
    command = f"marl-pool evaluate {second.path} episodes={EPISODES} seed=0"
    assert source.gap == f"not evaluated yet; do so by: {command}"
    assert not_evaluated([first, second]) == [second]


def test_an_evaluation_without_returns_is_not_enough(tmp_path: Path) -> None:
    run = evaluated(trained(tmp_path / "a"))
    (run.evaluation_dir / RETURNS).unlink()
    (source,) = read_sources([run])
    assert "no evaluation with each episode's return" in source.gap


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"seed": 5}, "seed 5 where the others have 0"),
        ({"episodes": 8}, "episodes 8 where the others have 16"),
        (
            {"changed": {"num_noise": 9}},
            "env {'num_noise': 9} where the others have as",
        ),
    ],
)
def test_an_evaluation_of_another_kind_is_a_gap(
    tmp_path: Path, other: dict[str, Any], told: str
) -> None:
    odd = evaluated(trained(tmp_path / "odd"), **other)
    usual = [evaluated(trained(tmp_path / f"{s}", seed=s)) for s in (1, 2)]
    source, *rest = read_sources([odd, *usual])
    assert told in source.gap
    assert source.evaluation is None
    assert all(one.evaluation for one in rest)


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("env.max_steps=7", "env.max_steps is 6 in "),
        ("env.reward_scale=1.0", "env.reward_scale is 0.01 in "),
        ("env=simple_tag", "env.name is simple_centroid in "),
    ],
)
def test_runs_of_different_tasks_are_refused(
    tmp_path: Path, key: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = [] if "env=" in key else SMALL
    trained(tmp_path / "a")
    Run.create(tmp_path / "b", compose("train", [*base, key]))
    assert cli.main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("marl-pool: runs that cannot be compared: " + told)
    assert err.count("\n") == 1


def test_one_run_twice_and_one_seed_twice_are_refused(tmp_path: Path) -> None:
    first, copy = trained(tmp_path / "a"), trained(tmp_path / "b")
    with pytest.raises(InputError, match="got one of them twice"):
        read_sources([first, Run.open(tmp_path / "a")])
    with pytest.raises(InputError, match="seed=0 included: expected one run"):
        methods_of(read_sources([first, copy]))


# Methods


def test_runs_that_differ_in_their_seed_alone_are_one_method(tmp_path: Path) -> None:
    keys = [("pooling=ada",), ("pooling=max",), ("pooling=ada", "threads=1")]
    runs = [
        trained(tmp_path / f"{place}", *own, seed=place)
        for place, own in enumerate(keys)
    ]
    ada, most = methods_of(read_sources(runs))
    assert [ada.name, most.name] == ["ada", "max"]
    assert [source.seed for source in ada.sources] == [0, 2]


def test_a_method_is_named_after_what_tells_it_apart(tmp_path: Path) -> None:
    keys = [
        ("pooling=ada", "ppo.lr=0.1", "env.num_noise=3"),
        ("pooling=ada", "ppo.lr=0.2", "env.num_noise=3"),
        ("pooling=ada", "ppo.lr=0.1", "env.num_noise=5"),
        ("pooling=ada", "pooling.query=mean", "ppo.lr=0.1", "env.num_noise=3"),
        ("pooling=max", "ppo.lr=0.1", "env.num_noise=3"),
    ]
    runs = [trained(tmp_path / str(place), *own) for place, own in enumerate(keys)]
    names = [method.name for method in methods_of(read_sources(runs))]
    assert names == [
        "ada query=None lr=0.1 · num_noise=3",
        "ada query=None lr=0.2 · num_noise=3",
        "ada query=mean lr=0.1 · num_noise=3",
        "max lr=0.1 · num_noise=3",
        "ada query=None lr=0.1 · num_noise=5",
    ]
    assert methods_of(read_sources(runs[:1]))[0].name == "ada"


# Numbers


def test_scores_and_areas_by_hand(tmp_path: Path) -> None:
    (own,) = study_of(several(tmp_path, ["ada"], 2)).measured
    assert own.points(AS_IS) == pytest.approx([0.8, 0.81])
    # (0.8 + 0.6) / 4 + (0.6 + 0.2) / 4, and the jitter's ladder ends at 0.2.
    assert own.points(Condition("area", "occlude")) == pytest.approx([0.55, 0.56])
    assert own.points(Condition("area", "jitter")) == pytest.approx([0.75, 0.76])
    assert own.points(Condition("rung", "occlude", 1.0)) == pytest.approx([0.2, 0.21])
    assert own.points(Condition("world", "more noise")) == pytest.approx([0.4, 0.41])
    interval = own.mean(AS_IS)
    # The luck of the worlds cancels, so the seeds' own range is all there is.
    np.testing.assert_allclose(interval, [0.805, 0.8, 0.81])
    assert not own.gaps


def test_a_lost_rung_is_a_gap_of_it_and_of_the_area(tmp_path: Path) -> None:
    whole = evaluated(trained(tmp_path / "a"))
    part = evaluated(trained(tmp_path / "b", seed=1), lost=[0.5])
    (own,) = study_of([whole, part]).measured
    for lost in (Condition("area", "occlude"), Condition("rung", "occlude", 0.5)):
        assert own.gaps[lost] == "a reason"
        assert not own.has(lost)
    assert own.has(Condition("rung", "occlude", 1.0))


def test_without_a_scripted_policy_there_are_returns_and_no_areas(
    tmp_path: Path,
) -> None:
    study = study_of([evaluated(trained(tmp_path / "a"), scripted=False)])
    (own,) = study.measured
    assert study.unit == "return"
    luck = np.random.default_rng(0).normal(size=EPISODES).mean()
    assert own.points(AS_IS) == pytest.approx([luck - 1.2])
    assert "an area needs scores" in own.gaps[Condition("area", "occlude")]


def test_several_groups_that_learn_have_no_scores(tmp_path: Path) -> None:
    run = evaluated(trained(tmp_path / "a"), groups=["fox", "hen"])
    assert Study(methods_of(read_sources([run])), "hen").unit == "return"
    html = written([run], tmp_path)
    assert "Robustness profiles (fox)" in html
    assert "Robustness profiles (hen)" in html
    assert "Not ranked: no score is defined here" in html


def test_conditions_that_only_some_suites_have_are_gaps(tmp_path: Path) -> None:
    runs = several(tmp_path, ["ada", "max"], 1)
    document = runs[1].evaluation_dir / DOCUMENT
    content = json.loads(document.read_text())
    for row in content["results"]:
        if row["perturbation"] == "occlude":
            row["label"] = "occlude among=signal"
    document.write_text(json.dumps(content))
    ada, most = study_of(runs).measured
    gap = "not in the suite of this evaluation"
    assert ada.gaps[Condition("area", "occlude among=signal")] == gap
    assert most.gaps[Condition("area", "occlude")] == gap
    assert ada.has(Condition("area", "jitter"))


def test_numbers_are_written_to_three_digits_with_a_minus() -> None:
    written = [number(value) for value in (-0.456, -0.001, 12.34, -345.6, np.nan)]
    minus = "\N{MINUS SIGN}"
    assert written == [f"{minus}0.46", "0.00", "12.3", f"{minus}346", "–"]
    assert span(Interval(0.0, -1.0, 2.0)) == f"{minus}1.00 to 2.00"
    assert span(Interval(0.0, np.nan, np.nan)) == ""
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 3.0, 2.0], [0.0, 1.0, 0.5]),
        ([2.0, 2.0], [0.5, 0.5]),
        ([np.nan, 1.0, 2.0], [None, 0.0, 1.0]),
        ([np.nan], [None]),
    ],
)
def test_shades_go_from_the_lowest_to_the_highest(
    values: ArrayLike, expected: list[float | None]
) -> None:
    assert shaded(np.asarray(values).tolist()) == expected


def test_dark_shades_have_white_letters() -> None:
    assert Cell("x").style == ""
    assert "rgb(255,255,255);color:#222" in Cell("x", tone=0.5).style
    assert "rgb(0,114,178);color:#fff" in Cell("x", tone=1.0).style


# The page


def test_three_sentences_say_what_was_done_and_found(tmp_path: Path) -> None:
    html = written(several(tmp_path, ["ada", "max"], 3), tmp_path)
    summary = re.search(r'class="summary">(.*?)</p>', html, re.S)
    assert summary
    first, second, third = re.split(r"(?<=[a-z\d)])\. ", summary[1])
    assert first == (
        "6 runs of 2 methods (ada and max) learned simple_centroid, 3 seeds each, and "
        "were tested in 16 episodes a condition, under 2 perturbations and 1 other "
        "world"
    )
    # Means over both methods and all seeds: 0.8 + 0.05 + 0.01, and so on.
    assert "Unperturbed they score 0.86 on average" in second
    assert "occlude costs most: 0.61 is left" in second
    assert "jitter leaves 0.81" in second
    assert third.startswith("With 3 seeds of a method no order")


def test_under_five_seeds_each_is_shown_and_none_is_ranked(tmp_path: Path) -> None:
    html = written(several(tmp_path, ["ada", "max"], 3), tmp_path)
    assert "Not ranked: 3 seeds of a method, and an order is given from 5 on." in html
    assert not re.search(r"\b[12]\. (ada|max)", texts(html))
    at_a_glance = [text for text, _, _ in cells(html, "overview")]
    assert "0.81 0.80, 0.81, 0.82" in at_a_glance
    # A shade would say which of two methods is better.
    matrix = html[html.index('id="improvement"') :].partition("</section>")[0]
    assert "background" not in matrix
    assert "1.00 1.00 to 1.00" in texts(matrix)


def test_five_seeds_are_ranked_with_intervals(tmp_path: Path) -> None:
    html = written(several(tmp_path, ["ada", "max"], 5), tmp_path)
    ranking = html[html.index('id="ranking"') :].partition("</section>")[0]
    assert "Not ranked" not in ranking
    assert texts(ranking).index("1. max") < texts(ranking).index("2. ada")
    assert "Max keeps most, 0.77 (" in html
    assert "before ada with 0.67 (" in html
    # Areas of 0.55 and 0.75 and 0.02 more for the mean seed; max has 0.1 more again.
    assert [text for text, _, _ in cells(html, "ranking")[2::4]] == ["0.23", "0.33"]


def test_one_seed_holds_for_this_policy_only(tmp_path: Path) -> None:
    html = written(several(tmp_path, ["ada", "max"], 1), tmp_path)
    assert "this policy only" in html
    gaps = [title for text, title, kind in cells(html, "ranking") if kind == "gap"]
    assert len(gaps) == 2
    assert all("fewer than two seeds" in title for title in gaps)
    assert "no interval" in texts(html[html.index('id="improvement"') :])


def test_methods_of_two_worlds_have_a_retraining_gap_and_no_drop(
    tmp_path: Path,
) -> None:
    runs = several(tmp_path, ["ada", "max"], 2, "env.num_noise=3")
    runs += several(tmp_path, ["ada", "max"], 2, "env.num_noise=9")
    html = written(runs, tmp_path)
    gaps = cells(html, "retraining")
    # The same scores in both worlds.
    assert [text for text, _, _ in gaps[2::4]] == ["0.00", "0.00"]
    assert "drop" not in texts(html)
    assert html.count("Trained and tested in num_noise=3") >= 3


def test_every_number_has_its_origin_and_every_gap_its_reason(tmp_path: Path) -> None:
    runs = several(tmp_path, ["ada", "max"], 2, "env.num_noise=3")
    runs += several(tmp_path, ["ada"], 1, "env.num_noise=9")
    runs += [trained(tmp_path / "bare", "pooling=cls")]
    parser = _Cells()
    parser.feed(written(runs, tmp_path))
    assert len(parser.cells) > 60
    for section, text, title, kind in parser.cells:
        if section != "origins" and (kind == "gap" or re.search(r"\d", text)):
            assert title, (section, text)


def test_origins_name_commit_configuration_seeds_episodes_and_file(
    tmp_path: Path,
) -> None:
    (run,) = several(tmp_path, ["ada"], 1)
    html = written([run], tmp_path)
    told = " ".join(text for text, _, _ in cells(html, "origins"))
    for part in (run.config_digest, "results.json", "iteration 3", "16", "0123abc"):
        assert part in told
    assert str(run.path.resolve()) in html


def test_what_is_missing_is_listed_with_the_command(tmp_path: Path) -> None:
    run = evaluated(trained(tmp_path / "a"), lost=[1.0])
    bare = trained(tmp_path / "b", "pooling=max")
    html = written([run, bare], tmp_path)
    missing = texts(html[html.index('id="gaps"') :])
    assert f"marl-pool evaluate {bare.path} episodes=16 seed=0" in missing
    assert "occlude: a reason" in missing
    assert "1 without an evaluation" in html


def test_runs_without_any_evaluation_have_learning_curves(tmp_path: Path) -> None:
    html = written([trained(tmp_path / "a"), trained(tmp_path / "b", seed=1)], tmp_path)
    assert html.count("<svg") == 1
    assert "None of them has an evaluation that counts" in html
    assert "not evaluated yet" in html


def test_a_run_that_logged_nothing_is_a_gap(tmp_path: Path) -> None:
    run = evaluated(trained(tmp_path / "a"))
    run.metrics_path.unlink()
    html = written([run], tmp_path)
    assert "No return_mean in metrics.csv of a." in html


def test_a_diagnosis_is_shown_as_means_over_seeds(tmp_path: Path) -> None:
    runs = several(tmp_path, ["ada", "max"], 2)
    for seed, run in enumerate(runs[:2]):
        whole = {"head": "all", "excess": 0.25 + seed, "excess_low": 0.1, "ok": True}
        rows = [{**whole, "margin": None, "nested": {}}, {"head": "0", "excess": 9.0}]
        rows[0]["width"] = 0.5
        content = json.dumps({"rows": rows[: 2 - seed]})
        (run.evaluation_dir / "diagnosis.json").write_text('{"rows": [{"old": 1}]}')
        (run.evaluation_dir / "diagnosis-2.json").write_text(content)
    shown = cells(written(runs, tmp_path), "theory")
    assert [text for text, _, _ in shown] == ["0.75", "gap", "0.50", "gap"]
    assert shown[0][1] == "diagnosis.json of 2 of 2 seeds: 0.25, 1.25"


def test_nothing_is_fetched_and_names_are_escaped(tmp_path: Path) -> None:
    runs = several(tmp_path / "<script>alert(1)</script>", ["ada", "max"], 2)
    html = written(runs, tmp_path)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html
    assert not re.findall(r'(?:src|href)="(?!data:|#)', html)
    assert not re.findall(r"url\((?!#)", html)
    svgs = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(svgs) >= 4
    ids = [name for svg in svgs for name in re.findall(r' id="([^"]+)"', svg)]
    assert not [name for name in ids if re.fullmatch(r"[a-z]+[0-9a-z]*_\d+", name)]


def test_an_existing_file_is_left_alone(tmp_path: Path) -> None:
    runs = [trained(tmp_path / "a")]
    (tmp_path / "page.html").write_text("mine")
    with pytest.raises(InputError, match=r"page\.html exists; choose another --out"):
        written(runs, tmp_path)
    assert (tmp_path / "page.html").read_text() == "mine"


def test_pages_without_a_name_stand_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [trained(tmp_path / "a")]

    class Stopped(page.datetime):
        """A clock that stands still."""

        @classmethod
        def now(cls, tz: Any = None) -> page.datetime:
            return page.datetime(2030, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(page, "datetime", Stopped)
    paths = [report(runs, None, SETTINGS) for _ in range(2)]
    stem = "reports/20300102-030405-simple_centroid"
    assert paths == [Path(f"{stem}.html"), Path(f"{stem}-2.html")]


# Policies at work


@pytest.fixture
def playing(tmp_path: Path) -> list[Run]:
    """Runs with policies, in a world so small that they are quick to film."""
    return [with_policy(run) for run in several(tmp_path, ["ada", "max"], 2)]


def test_attention_is_read_from_the_policies(
    playing: list[Run], tmp_path: Path
) -> None:
    html = written(playing, tmp_path)
    ada, most = cells(html, "attention")[:5], cells(html, "attention")[5:]
    assert 0 < float(ada[0][0]) <= 1
    # self, signal, noise, and the first two together; equal weights give N's shares.
    numbers = [re.findall(r"(\d+)%", text) for text, _, _ in ada[1:]]
    assert [int(equal) for _, equal in numbers] == [14, 43, 43, 57]
    shares = [int(share) for share, _ in numbers]
    assert sum(shares[:3]) == pytest.approx(100, abs=2)
    assert shares[3] == pytest.approx(shares[0] + shares[1], abs=1)
    assert [title for _, title, _ in most] == [
        "its pooling head has no attention weights"
    ] * 5


def films(html: str) -> list[bytes]:
    found = re.findall(r'src="data:video/webm;base64,([^"]+)"', html)
    return [base64.b64decode(data) for data in found]


def test_videos_show_clean_and_perturbed_side_by_side(
    playing: list[Run], tmp_path: Path
) -> None:
    html = written(playing, tmp_path, videos=True)
    # One for each method; the perturbation is the one that costs most.
    assert html.count("<b>unperturbed</b><b>occlude 1</b>") == 2
    found = films(html)
    assert len(found) == 2
    (tmp_path / "film.webm").write_bytes(found[0])
    capture = cv2.VideoCapture(str(tmp_path / "film.webm"))
    images = []
    while (frame := capture.read())[0]:
        images.append(frame[1].astype(int))
    # Of seven frames every second one.
    assert len(images) == 4
    width = images[0].shape[1]
    assert width > 2 * images[0].shape[0] * 0.8
    half = (width - 6) // 2
    clean, perturbed = images[-1][:, :half], images[-1][:, -half:]
    assert np.abs(clean - perturbed).max() > 100
    assert len(found[0]) < 300_000


def test_a_policy_that_cannot_be_read_is_a_gap(tmp_path: Path) -> None:
    (run,) = several(tmp_path, ["ada"], 1)
    html = written([run], tmp_path, videos=True)
    assert not films(html)
    assert "has no policy &#39;best&#39;" in html


# The command


def test_the_command_evaluates_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [with_policy(trained(tmp_path / f"{s}", seed=s)) for s in (0, 1)]
    out = tmp_path / "page.html"
    words = ["report", *(str(run.path) for run in runs), "--out", str(out)]
    keys = ["suite=quick", "episodes=4", "threads=1", "videos=false"]
    assert cli.main([*words, "evaluate=true", *keys]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert not not_evaluated(runs)
    assert "tested in 4 episodes a condition" in out.read_text()
    assert not list((runs[0].evaluation_dir).glob("results-2*"))


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["suite=quick"], "suite: expected one of videos, evaluate, threads, or eval"),
        (
            ["vidoes=false"],
            "vidoes: expected one of videos, evaluate, threads, or eval",
        ),
        (["evaluate=true", "suite=quik"], "Did you mean 'quick'?"),
        (["videos=3"], "videos: expected true or false, got 3"),
        (["--out", "{}/here.html"], "here.html exists; choose another --out"),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], keys: list[str], told: str
) -> None:
    run = trained(tmp_path / "a")
    (tmp_path / "here.html").touch()
    words = [word.format(tmp_path) for word in keys]
    assert cli.main(["report", str(run.path), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


# In a browser


PROBE = """
<script>
addEventListener("load", () => {
  const films = [...document.querySelectorAll("video")];
  const told = document.createElement("pre");
  told.id = "probe";
  const tell = () => {
    told.textContent = JSON.stringify({
      fetched: performance.getEntriesByType("resource").map(r => r.name.slice(0, 40)),
      films: films.map(f => [f.videoWidth, f.error && f.error.message]),
      wide: document.documentElement.scrollWidth - innerWidth,
      figures: [...document.querySelectorAll("svg")].map(s => s.clientHeight),
    });
    document.body.append(told);
  };
  Promise.all(films.map(f => f.readyState ? 0 : new Promise(
    done => { f.onloadedmetadata = f.onerror = done; f.load(); }
  ))).then(tell);
});
</script>
"""


def browse(folder: Path, file: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
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
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_browser_shows_it_without_network_or_complaint(
    playing: list[Run], tmp_path: Path
) -> None:
    html = written(playing, tmp_path, videos=True)
    picture = tmp_path / "page.png"
    shown = browse(tmp_path, tmp_path / "page.html", f"--screenshot={picture}")
    assert "CONSOLE" not in shown.stderr, shown.stderr
    image = cv2.imread(str(picture))
    assert image is not None
    assert image.shape == (3000, 1100, 3)
    # There is something on it, in the first method's colour too.
    assert (image < 80).all(-1).mean() > 0.005
    assert (np.abs(image.astype(int) - (0xB2, 0x72, 0x00)).max(-1) < 8).sum() > 500
    # The same page with a script that looks about.
    probed = tmp_path / "probed.html"
    policy = "default-src 'none'; "
    assert policy in html
    opened = html.replace(policy, policy + "script-src 'unsafe-inline'; ")
    probed.write_text(opened.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    looked = browse(tmp_path, probed, "--dump-dom")
    found = re.search(r'<pre id="probe">(.*?)</pre>', looked.stdout, re.S)
    assert found, looked.stderr
    told = json.loads(found[1].replace("&amp;", "&"))
    assert [name for name in told["fetched"] if not name.startswith("data:")] == []
    assert [error for _, error in told["films"]] == [None, None]
    assert all(width > 400 for width, _ in told["films"])
    assert told["wide"] <= 0
    assert min(told["figures"]) > 50
