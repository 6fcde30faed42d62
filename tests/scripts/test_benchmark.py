"""The benchmark at a tiny size: that it runs and writes what it promises."""

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
NAMES = {
    "env/simple_centroid",
    "env/simple_tag",
    "env/boxworld_pixels",
    "env/pong",
    "env/pettingzoo_workers/simple_spread",
    "env/pettingzoo_workers/multiwalker",
    "env/pettingzoo_workers/knights_archers_zombies",
    "levels/boxworld",
    "attention/width_one",
    "sample/simple_centroid",
    "sample/simple_centroid/floor",
    "sample/simple_centroid/stock_batched",
    "sample/simple_centroid/stock_single",
    "sample/simple_tag",
    "sample/simple_tag/floor",
    "sample/simple_spread",
    "sample/simple_spread/floor",
    "sample/boxworld_pixels",
    "sample/boxworld_pixels/floor",
    "sample/simple_tag/two_runners",
    "sample/boxworld_pixels/two_runners",
    "sample/pong",
    "sample/pong/floor",
    "iteration/own_critic",
    "iteration/set_critic",
    "iteration/simple_centroid",
    "iteration/simple_centroid/fast",
    "iteration/boxworld_pixels",
    "iteration/simple_centroid/two_learners",
    "iteration/boxworld_pixels/two_learners",
    "install/time",
    "install/wheel",
    "install/import",
    "install/first_call",
    "time_to_return/simple_centroid",
    "time_to_skill/simple_centroid",
    "time_to_skill/simple_tag",
    "time_to_skill/simple_spread",
    *(f"time_to_skill/{name}" for name in ("boxworld", "boxworld_pixels", "cartpole")),
    "generation/cartpole",
    *(f"generation/cartpole/{peer}" for peer in ("pycma", "vmap", "vmap/longest")),
    "clone/ant",
    "data/knn_centroid",
    "train/knn_centroid",
    "train/knn_centroid/plain",
    "evaluate/simple_centroid",
    "suite/standard",
    "layer/swarm",
    "denormals/width_128",
    "denormals/softmax",
}
NAMES |= {
    f"kernel/{network}/{passes}"
    for network in (
        *("simple_centroid", "simple_tag", "boxworld", "boxworld_50"),
        *("width_16", "width_32", "width_64"),
        *(f"simple_centroid/{kind}" for kind in ("64_rows", "float64", "padded")),
        *(f"{name}/avx2" for name in ("simple_centroid", "width_16", "width_64")),
        *("simple_centroid/trained", "simple_tag/trained", "boxworld_50/trained"),
    )
    for passes in ("forward", "both")
}
EVERY_ROW = """
import json, ray, torch
from benchmark import BENCHMARKS, TINY, here
torch.set_num_threads(1)  # other tests have the other cores
rows = [row for name in BENCHMARKS for row in here(name, TINY)]
ray.shutdown()
print(json.dumps(rows))
"""
CLIMB = """
import ray
from benchmarks import learning
from marl_pool.config import compose
small = ["env.max_steps=4", "ppo.num_envs=4", "ppo.batch_size=32", "threads=1"]
small += ["ppo.minibatch_size=null"]
learning.compose = lambda verb, overrides: compose(verb, [*overrides, *small])
learning.RETURN_WINDOW = 8
learning.GOALS.update(dict.fromkeys(learning.GOALS, -1e9))
print(learning.climb(0, 120.0, "cpu"))
ray.shutdown()
"""
LEARN = """
import ray
from dataclasses import replace
from benchmarks import skills
small = "env.max_steps=4", "ppo.num_envs=4", "ppo.batch_size=32"
small += "ppo.minibatch_size=null",
skills.RETURN_WINDOW = 8
tag = skills.SKILLS["simple_tag"]
tag = replace(tag, overrides=(*tag.overrides, *small), random=0.0, fraction=0.0)
print(skills.learn(tag, 0, 120.0, "cpu"), tag.goal)
ray.shutdown()
"""
IMITATE = """
from dataclasses import replace
from benchmarks import skills
small = "clone.episodes=8", "clone.validation_episodes=4", "clone.iteration_batches=2"
small += "clone.play_episodes=4", "total_batches=8"
box = skills.SKILLS["boxworld"]
box = replace(box, overrides=(*box.overrides, *small))
print(skills.imitate(replace(box, fraction=-1.0), 0, 120.0, "cpu"))
print(skills.imitate(replace(box, fraction=2.0), 0, 120.0, "cpu"))
"""


def python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_row_is_measured():
    rows = json.loads(python("-c", EVERY_ROW, cwd=SCRIPTS).splitlines()[-1])
    assert {row["name"] for row in rows} == NAMES
    for row in rows:
        assert {"name", "value", "unit", "comparator", "ratio"} <= set(row)
        assert row["value"] is None or row["value"] > 0
    compared = [
        row
        for row in rows
        if row["name"].startswith("sample/") and "two_runners" not in row["name"]
    ]
    assert all(row["ratio"] > 0 for row in compared)


def test_a_goal_that_anything_reaches_is_reached():
    assert "None" not in python("-c", CLIMB, cwd=SCRIPTS).splitlines()[-1]


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


def test_a_skill_that_random_actions_have_is_learned_in_two_checks():
    # Two iterations of 32 steps: 8 episodes each.
    assert python("-c", LEARN, cwd=SCRIPTS).splitlines()[-1].endswith(", 64) 0.0")


def test_a_student_is_measured_until_it_reaches_the_goal_or_its_run_ends():
    reached, missed = python("-c", IMITATE, cwd=SCRIPTS).splitlines()[-2:]
    assert reached.endswith(", 2)")
    assert missed == "None"


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


def test_a_process_that_fails_is_an_error(benchmark):
    with pytest.raises(benchmark.BenchmarkError, match="exit status"):
        benchmark.apart("env/simple_tag", ["--no-such-flag"])


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
