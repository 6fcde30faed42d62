"""The benchmark at a tiny size: it runs and writes the documented results."""

import importlib
import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import pytest

from helpers.paths import ROOT
from marl_pool.compiled.choice import chosen_kernels

pytestmark = pytest.mark.slow

SCRIPTS = ROOT / "scripts"
REPEATED = (
    *("kernel/simple_tag/trained", "kernel/boxworld_50/trained"),
    *("sample/boxworld_pixels/two_runners", "iteration/boxworld_pixels/two_learners"),
)
"""Rows of processes whose tasks and functions other rows have."""
FURTHER = {
    *("sample/simple_centroid/stock_batched", "sample/simple_centroid/stock_single"),
    *("install/time", "install/import", "install/first_call"),
    *(f"generation/cartpole/{peer}" for peer in ("pycma", "vmap", "vmap/longest")),
    *("time_to_return/simple_centroid", "train/knn_centroid/plain"),
    *("denormals/width_128", "denormals/softmax"),
}
"""Rows besides those that a benchmark is named after."""
MEASURED = f"""
import json, ray, torch
from dataclasses import replace
from benchmark import BENCHMARKS, TINY, here
from benchmarks import learning, skills
from marl_pool.config import compose
torch.set_num_threads(1)  # other tests have the other cores
names = [name for name in BENCHMARKS if name not in {REPEATED}]
rows = [row for name in names for row in here(name, TINY)]

def short(name, **changes):
    skill = skills.SKILLS[name]
    overrides = (*skill.overrides, *skills.SHORT[skill.verb])
    return replace(skill, overrides=overrides, **changes)

tag = short("simple_tag", random=0.0, fraction=0.0)
learning.RETURN_WINDOW = 8
words = [*skills.SHORT["train"], "threads=1"]
learning.compose = lambda verb, overrides: compose(verb, [*overrides, *words])
learning.GOALS.update(dict.fromkeys(learning.GOALS, -1e9))
reached = {{
    "climbed": learning.climb(0, 120.0, "cpu"),
    "goal": tag.goal,
    "learned": skills.learn(tag, 0, 120.0, "cpu"),
    "imitated": [
        skills.imitate(short("boxworld", fraction=fraction), 0, 120.0, "cpu")
        for fraction in (-1.0, 2.0)
    ],
}}
ray.shutdown()
print(json.dumps([rows, reached]))
"""


def python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def measured():
    """Rows at the tiny size, and what short trainings reached, in one process."""
    return json.loads(python("-c", MEASURED, cwd=SCRIPTS).splitlines()[-1])


def test_every_row_is_measured(measured, benchmark):
    rows, _ = measured
    names = {*benchmark.BENCHMARKS} - {*REPEATED}
    networks = {name for name in names if name.startswith("kernel/")}
    expected = {f"{name}/{way}" for name in networks for way in ("forward", "both")}
    tasks = {
        name for name in names if name.startswith("sample/") and name.count("/") < 2
    }
    expected |= {f"{name}/floor" for name in tasks} | FURTHER
    expected |= names - networks - {"denormals"}
    assert {row["name"] for row in rows} == expected
    assert {*benchmark.AIMS} <= expected | {*REPEATED}
    for row in rows:
        assert {"name", "value", "unit", "comparator", "ratio"} <= set(row)
        assert row["value"] is None or row["value"] > 0
        is_compared = row["name"].startswith("sample/") and "two" not in row["name"]
        assert not is_compared or row["ratio"] > 0


def test_a_goal_that_anything_reaches_is_reached(measured):
    _, reached = measured
    assert None not in reached["climbed"].values()
    # A skill that random actions have is learned in two checks: two iterations of 48
    # steps, 12 episodes each.
    assert (reached["learned"][1], reached["goal"]) == (96, 0.0)
    # A student is measured until it reaches the goal or its run ends.
    student, unreached = reached["imitated"]
    assert (student[1], unreached) == (2, None)


def test_times_to_a_goal_are_medians_over_seeds_beside_those_of_torch(
    benchmark, monkeypatch
):
    def climb(seed: int, limit: float, device: str) -> dict[str, object]:
        slower = 3 if chosen_kernels() == "torch" else 1
        reached = (slower * (seed + 1.0), 1000 * seed)
        return {
            "time_to_return": reached,
            "time_to_skill": reached if seed == 2 else None,
        }

    learning = importlib.import_module("benchmarks.learning")
    monkeypatch.setattr(learning, "climb", climb)
    returned, skilled = learning.time_to_goals(replace(benchmark.TINY, seeds=3))
    assert (returned.value, returned.ratio) == (2.0, 3.0)
    assert "kernels=torch: 6 s, 1,000 env steps" in returned.comparator
    assert "3 seeds: 1 to 3 s; 0 failed" in returned.note
    assert (skilled.value, skilled.ratio) == (None, None)
    assert "2 failed" in skilled.note


def test_it_writes_the_table_with_the_peak_memory_of_each_process(tmp_path):
    file = tmp_path / "rows.json"
    command = [str(SCRIPTS / "benchmark.py"), "--tiny", "--json", str(file)]
    benchmarks = ["env/simple_centroid", "sample/simple_tag"]
    printed = python(*command, "--only", *benchmarks, cwd=tmp_path)
    content = json.loads(file.read_text())
    assert content["machine"]["torch"]
    names = [row["name"] for row in content["rows"]]
    assert names == [*benchmarks, "sample/simple_tag/floor"]
    assert all(f"`{name}`" in printed for name in names)
    # torch alone takes more than 100 MB.
    assert all(100 < row["peak_memory_mb"] < 20_000 for row in content["rows"])


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("benchmark")


def test_a_failing_benchmark_loses_no_rows(benchmark, monkeypatch, tmp_path, capsys):
    def apart(name: str, arguments: object) -> list[dict[str, object]]:
        if name == "layer/swarm":
            raise benchmark.BenchmarkError("exit status 3")
        row = Row(name, 1.0, "s")
        return [{**asdict(row), "peak_memory_mb": 1.0}]

    Row = benchmark.Row
    monkeypatch.setattr(benchmark, "apart", apart)
    file = tmp_path / "rows.json"
    names = ["env/simple_tag", "layer/swarm", "env/simple_centroid"]
    command = ["benchmark.py", "--json", str(file), "--only", *names]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert "layer/swarm" in str(ended.value)
    content = json.loads(file.read_text())
    assert [row["name"] for row in content["rows"]] == [names[0], names[2]]
    assert content["failed"] == {"layer/swarm": "exit status 3"}
    assert "| `env/simple_centroid` |" in capsys.readouterr().out


def test_patterns_choose_benchmarks_in_their_order(benchmark):
    matches = benchmark.matching(["layer/swarm", "env/simple_*", "env/*"])
    names = "simple_centroid", "simple_tag", "boxworld_pixels", "pong"
    processes = "simple_spread", "multiwalker", "knights_archers_zombies"
    names = *names, *(f"pettingzoo_workers/{name}" for name in processes)
    assert matches == ["layer/swarm", *(f"env/{name}" for name in names)]
    with pytest.raises(ValueError, match=r"no benchmark env/wing; .* env/pong"):
        benchmark.matching(["env/*", "env/wing"])


def test_a_table_takes_each_row_from_the_last_file(
    benchmark, monkeypatch, tmp_path, capsys
):
    files = tmp_path / "first.json", tmp_path / "last.json"
    for file, values in zip(files, ({"a": 1.0, "b": 2.0}, {"b": 4567.8}), strict=True):
        rows = [
            {**asdict(benchmark.Row(name, value, "s")), "peak_memory_mb": 9.0}
            for name, value in values.items()
        ]
        file.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--table", *map(str, files)])
    benchmark.main()
    printed = capsys.readouterr().out.splitlines()
    assert printed[2:] == [
        "| `a` | 1 s |  |  |  | 9 MB |",
        "| `b` | 4,568 s |  |  |  | 9 MB |",
    ]


def test_a_gpu_measures_only_what_uses_it(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark.torch.cuda, "device_count", lambda: 1)
    names = {name for name in benchmark.BENCHMARKS if benchmark.uses(name, "cuda")}
    assert {"env/simple_centroid", "sample/simple_centroid", "suite/standard"} <= names
    assert not any("kernel" in name or "/two_" in name for name in names)
    assert all(benchmark.uses(name, "cpu") for name in benchmark.BENCHMARKS)


def test_a_process_that_fails_is_an_error(benchmark, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(benchmark.BenchmarkError, match="exit status 1"):
        benchmark.apart("env/simple_tag", [])


def test_a_missing_extra_is_said_before_anything_runs(benchmark, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "ale_py" else find_spec(name),
    )
    monkeypatch.setattr(benchmark, "apart", None)  # calling it would fail
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--only", "sample/pong"])
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 2
    assert "marl-pool[atari]" in capsys.readouterr().err
