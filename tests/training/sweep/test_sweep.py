"""Sweeps, without training: grids, folders, tables, the study in words."""

import io
import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from helpers.tables import yaml_cases
from helpers.training import run_python
from marl_pool import InputError
from marl_pool.cli import main as cli
from marl_pool.config import check, compose, plan_grid, plan_sweep
from marl_pool.config.option_files import files_of
from marl_pool.options.overrides import written
from marl_pool.runs.mirrored import mirror_of, validate_same_sweep
from marl_pool.runs.run import Best, Run
from marl_pool.runs.sweep import LONGEST_NAME, Sweep, Trial, read_table, trial_name
from marl_pool.training.settings import SweepSettings, TrainConfig

ray = pytest.importorskip("ray")

from marl_pool.training.jobs import JOBS
from marl_pool.training.sweep import estimate
from marl_pool.training.sweep.estimate import (
    Throughput,
    detectable,
    duration_of,
    size_of,
    smallest_difference,
)
from marl_pool.training.sweep.folder import begin_sweep
from marl_pool.training.sweep.plan import is_done
from marl_pool.training.sweep.progress import TrialState, TrialTable
from marl_pool.training.sweep.run import _report_damage
from marl_pool.training.sweep.schedule import Scheduler, bundles, saved
from marl_pool.training.sweep.trial import Outcome

pytestmark = pytest.mark.usefixtures("elsewhere")

TRAIN = JOBS["train"]

HEADS = ["ada", "avg", "max", "cls"]
CENTROID_COUNTS = ["1-31-0", "1-15-16", "1-3-28", "1-1-30"]
TAG_COUNTS = ["1-3-0", "1-3-4", "1-3-12", "1-3-28"]
VIEWS = ["entities", "pixels"]


def saved_run(
    path: Path, config: dict, steps: list[int], ended: bool = False, **metrics: float
) -> Run:
    """A run as training leaves it, without weights."""
    run = Run.create(path, config)
    for number, steps_done in enumerate(steps, 1):
        run.log({"iteration": number, "env_steps": steps_done, **metrics})
    run.close()
    with run.checkpoint(len(steps), ended=ended) as folder:
        (folder / "progress.json").write_text("{}")
    with run.save_policy_dir(Best(len(steps), 0.0)):
        pass
    return run


# Grids


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("seed=0,1,2", [0, 1, 2]),
        ("seed=range(0,6,2)", [0, 2, 4]),
        ("seed=choice(3,1)", [3, 1]),
        ("ppo.lr=1e-3,0.5", [0.001, 0.5]),
        ("env.counts=1-31-0,1-3-28", ["1-31-0", "1-3-28"]),
        ("policy.head_hidden=[1,2],[3]", [[1, 2], [3]]),
        ("pooling.query='self',[0,1],null", ["self", [0, 1], None]),
        ("ppo.normalize_value_loss=true,false", [True, False]),
        ("modules=null,{agent: shared}", [None, {"agent": "shared"}]),
    ],
)
def test_a_key_with_several_values_is_swept(text, values):
    plan = plan_sweep([text])
    key = text.partition("=")[0]
    assert plan.grid == {key: values}
    for trial, value in zip(plan.trials, values, strict=True):
        entry = trial.config.plain
        for part in key.split("."):
            entry = entry[part]
        assert entry == value
        assert trial.config == check("train", trial.config.plain)


def test_trials_are_the_product_and_each_is_as_train_composes_it():
    axes = {"pooling": ["max", "ada"], "env.counts": ["1-2-0", "1-1-1"], "seed": [3, 4]}
    swept = [f"{key}={','.join(map(str, values))}" for key, values in axes.items()]
    plan = plan_sweep([*swept, "ppo.lr=0.5", "sweep.cpus_per_trial=3"])
    combinations = list(itertools.product(*axes.values()))
    assert [tuple(trial.values.values()) for trial in plan.trials] == combinations
    for trial, values in zip(plan.trials, combinations, strict=True):
        texts = [f"{key}={v}" for key, v in zip(axes, values, strict=True)]
        assert trial.name == ",".join(texts)
        expected = compose("train", [*texts, "ppo.lr=0.5", "threads=3"])
        assert trial.config.plain == expected


def test_interpolations_of_swept_keys_follow_them():
    plan = plan_sweep(["encoder.num_heads=2,4", "pooling=ada", "seed=${env.max_steps}"])
    assert [t.config.pooling["num_heads"] for t in plan.trials] == [2, 4]
    assert plan.trials[0].config.seed == 128


# Presets


@pytest.mark.parametrize(
    ("name", "env", "axis", "values", "steps"),
    [
        ("figure5", "simple_centroid", "env.counts", CENTROID_COUNTS, 500 * 8192),
        ("figure7", "simple_tag", "env.counts", TAG_COUNTS, 500 * 8192),
        ("figure8", "boxworld", "env.observation", VIEWS, 3000 * 14400),
    ],
)
def test_presets_are_the_studies_of_the_paper(name, env, axis, values, steps):
    plan = plan_sweep([f"experiment=adapool/{name}"])
    assert plan.grid == {"pooling": HEADS, axis: values, "seed": [0, 1, 2, 3, 4]}
    paper = {
        "figure5": ["ppo=paper"],
        "figure7": ["encoder=paper_tag", "ppo=paper_tag"],
    }
    base = compose("train", [f"experiment={env}", *paper.get(name, [])])
    for trial in plan.trials:
        for part in ("encoder", "policy", "ppo"):
            assert trial.config.plain[part] == base[part]
        assert trial.config.total_steps == steps
        assert trial.config.env.name == env


def test_a_preset_is_reduced_by_the_command():
    kept = ["experiment=adapool/figure5", "total_steps=300_000", "ppo=fast"]
    plan = plan_sweep([*kept, "env.counts=1-3-28", "seed=7,8"])
    assert plan.grid == {"pooling": HEADS, "env.counts": ["1-3-28"], "seed": [7, 8]}
    assert plan.overrides == kept
    assert plan.trials[0].name == "pooling=ada,env.counts=1-3-28,seed=7"
    assert plan.trials[0].config.plain["ppo"] == compose("train", ["ppo=fast"])["ppo"]
    assert plan_grid(plan.grid, plan.overrides) == plan


@pytest.mark.parametrize("name", ["figure5", "figure7", "figure8"])
def test_the_reduced_form_in_a_presets_comment_works(name):
    text = files_of("experiment")[f"adapool/{name}"].read_text()
    lines = text.partition("marl-pool sweep ")[2].partition("\n\n")[0]
    words = lines.replace("#", "").replace("\\", "").split()
    assert f"experiment=adapool/{name}" in words
    assert 0 < len(plan_sweep(words).trials) <= 24


# Refusals


@yaml_cases("arguments, message")
def test_a_wrong_sweep_is_refused_in_one_line(refused, arguments, message):
    assert message in refused("sweep", *arguments)
    assert not list(Path().iterdir())
    assert not ray.is_initialized()


@yaml_cases("words, message")
def test_a_grid_is_nothing_for_train(refused, words, message):
    assert message in refused(*words.split())


def test_a_configuration_is_printed_though_a_required_key_is_swept(capsys):
    modules = "env.module=mpe2.simple_spread_v3,mpe2.simple_tag_v3"
    assert cli.main(["sweep", "env=pettingzoo", modules, "--cfg"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["env"]["module"] == "mpe2.simple_spread_v3"
    assert len(printed["grid"]["env.module"]) == 2


def test_the_ranges_of_a_search_are_printed(capsys):
    words = ["--search", "ppo.lr=log_uniform(1e-4,1e-2)", "pooling=choice(ada,max)"]
    assert cli.main(["sweep", *words, "--cfg"]) == 0
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first == "# searched: ppo.lr=log_uniform(0.0001,0.01)"
    assert second == "# searched: pooling=choice(ada,max)"


@pytest.mark.slow
def test_refusals_do_not_load_ray(tmp_path):
    commands = [
        ["sweep", "env.num_nois=1,2"],
        ["sweep", "seed=0,0"],
        ["sweep", "seed=0,1", "--cfg"],
        ["sweep", "experiment=adapool/figure5", "pooling=ada,adda"],
        ["resume", "sweeps", "pooling=max"],
    ]
    Sweep("sweeps", {"seed": [0, 1]}, []).path.mkdir()
    Sweep("sweeps", {"seed": [0, 1]}, []).write()
    source = f"""
import json, sys
from marl_pool.cli.main import main
print(json.dumps([main(command) for command in {commands!r}]))
print(json.dumps([m for m in ("ray", "scipy", "pyarrow") if m in sys.modules]))
"""
    result = run_python("-c", source)
    assert result.returncode == 0, result.stderr
    codes, loaded = result.stdout.splitlines()[-2:]
    assert json.loads(codes) == [2, 2, 0, 2, 2]
    assert json.loads(loaded) == []


def test_a_missing_device_is_refused_before_ray_starts(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    line = refused("sweep", "device=cpu,cuda", "--sweep-dir", "s")
    assert "device: expected cpu, since torch finds no CUDA device" in line
    assert "got cuda (trial device=cuda)" in line
    assert not ray.is_initialized()
    assert not Path("s").exists()


# Names and folders

values = st.text(max_size=8) | st.integers() | st.booleans() | st.none()


@given(st.lists(values | st.lists(values, max_size=2), min_size=2, max_size=20))
def test_names_are_paths_and_as_distinct_as_the_values(given_values):
    names = {trial_name({"a.b": value}) for value in given_values}
    assert len(names) == len({json.dumps(value) for value in given_values})
    for name in names:
        assert "/" not in name
        assert "\0" not in name


def test_a_long_name_is_cut_but_stays_its_own():
    long = [trial_name({"key": "x" * 500 + end}) for end in "ab"]
    assert long[0] != long[1]
    assert all(len(name) < LONGEST_NAME + 10 for name in long)
    assert trial_name({"pooling": "a.b:C", "q": [1, 2]}) == "pooling=a.b:C,q=[1,2]"


def test_a_text_cannot_look_like_several_values():
    pairs = [("1,b=2", "3"), ("1", "2,b=3"), (1, 2), ("1", "2")]
    assert len({trial_name({"a": a, "b": b}) for a, b in pairs}) == len(pairs)


def test_a_sweep_folder_is_read_as_it_was_written(tmp_path):
    sweep = Sweep(tmp_path / "s", {"a": [1, None], "b": ["x"]}, ["c=3"], tmp_path)
    with sweep.lock():
        sweep.write()
    copy = Sweep.open(sweep.path)
    assert (copy.grid, copy.overrides) == (sweep.grid, sweep.overrides)
    assert copy.config_dir == str(tmp_path)
    assert list(copy.grid) == ["a", "b"]


@pytest.mark.parametrize("text", ["", "grid: {}\n", "[", "grid: 3\npackage_version: 1"])
def test_a_damaged_sweep_is_refused(tmp_path, text):
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(InputError, match=r"sweep\.yaml cannot be read"):
        Sweep.open(tmp_path)


def test_two_processes_cannot_run_one_sweep(tmp_path):
    sweep = Sweep(tmp_path / "s", {}, [])
    refusal = pytest.raises(InputError, match="another process is running it")
    with sweep.lock(), refusal, sweep.lock():
        pytest.fail("it was held twice")


def test_a_new_sweep_does_not_touch_an_earlier_one(refused, tmp_path):
    (tmp_path / "s").mkdir()
    Sweep("s", {"seed": [0, 1]}, []).write()
    line = refused("sweep", "seed=0,1", "--sweep-dir", "s")
    assert "s exists; choose another --sweep-dir or `marl-pool resume s`" in line
    (tmp_path / "t" / "trials" / "seed=0").mkdir(parents=True)
    line = refused("sweep", "seed=0,1", "--sweep-dir", "t")
    assert "t/trials: expected a new or empty folder for a sweep, got one with " in line
    assert line.endswith("seed=0\n")


@pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--or-resume"]])
def test_a_new_sweep_does_not_hide_a_run(refused, flags):
    run = Run.create("taken", compose("train", []))
    line = refused("sweep", "seed=0,1", "--sweep-dir", "taken", *flags)
    assert "taken: expected a new or empty folder for a sweep, got one with " in line
    assert line.endswith("config.yaml\n")
    assert [item.name for item in run.path.iterdir()] == ["config.yaml"]


@yaml_cases("override, message")
def test_resume_of_a_sweep_takes_run_control_only(refused, tmp_path, override, message):
    (tmp_path / "s").mkdir()
    Sweep("s", {"total_steps": [1, 2]}, []).write()
    assert message in refused("resume", "s", override)


@pytest.mark.parametrize(
    ("again", "config_dir", "message"),
    [
        (["pooling=max,avg", "seed=0,1"], None, "grid: expected .*pooling.*, got"),
        (["seed=0,1", "pooling=max,avg"], "other", "--config-dir: expected .*other"),
    ],
)
def test_another_order_or_other_files_are_another_sweep(again, config_dir, message):
    Path("other").mkdir()
    plan = plan_sweep(["seed=0,1", "pooling=max,avg"])
    flags = {"or_resume": True, "dry_run": False}
    Path("s").mkdir()
    begin_sweep("s", plan, None, **flags).write()
    assert begin_sweep("s", plan, None, **flags).grid == plan.grid
    with pytest.raises(InputError, match=message):
        begin_sweep("s", plan_sweep(again), config_dir, **flags)


# Storage


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def write_sweep():
    """A function that writes a sweep to a folder, with a run of its first trial."""

    def write(path: Path, *words: str) -> None:
        plan = plan_sweep([*words])
        verb = plan.trials[0].config.verb
        sweep = Sweep(path, plan.grid, plan.overrides, verb=verb, space=plan.space)
        (path / "trials").mkdir(parents=True)
        sweep.write()
        config = plan.trials[0].config.plain
        saved_run(sweep.run_path(plan.trials[0]), config, [64, 128])

    return write


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("seed=0,2", "pooling=max"), "grid"),
        (("seed=0,1", "pooling=avg"), "overrides"),
    ],
)
@pytest.mark.parametrize("command", ["url", "key", "again"])
def test_a_namesake_of_a_sweep_in_the_storage_is_left_alone(
    refused, write_sweep, elsewhere, words, message, command
):
    store, mine = f"file://{elsewhere}/store", ("seed=0,1", "pooling=max")
    write_sweep(Path("sweeps/s"), *mine, f"storage={store}")
    write_sweep(Path("store/s"), *words)
    before = files(elsewhere)
    again = (*mine, "--sweep-dir=sweeps/s", "--or-resume", f"--storage={store}")
    commands = {
        "url": ("resume", f"{store}/s"),
        "key": ("resume", "sweeps/s", f"storage={store}"),
        "again": ("sweep", *again),
    }
    line = refused(*commands[command])
    expected = f"storage: expected the sweep sweeps/s at {store}/s, got another, with "
    assert expected + message in line
    assert files(elsewhere) == before


def test_a_sweep_is_the_one_in_the_storage_whatever_a_session_may_change(
    write_sweep, elsewhere
):
    write_sweep(Path("s"), "seed=0,1", "pooling=max", "sweep.concurrency=2")
    write_sweep(Path("store/s"), "seed=0,1", "pooling=max", "total_steps=50")
    mirror = mirror_of(Path("s"), f"file://{elsewhere}/store")
    validate_same_sweep(Sweep.open("s"), mirror)
    # A run is none.
    Path("store/s/config.yaml").touch()
    with pytest.raises(InputError, match="expected the sweep s at .*, got a run"):
        validate_same_sweep(Sweep.open("s"), mirror)


FOREIGN = ["env=pettingzoo", "env.module=gymnasium:CartPole-v1"]


def test_the_same_command_resumes_a_sweep_whose_session_settings_changed() -> None:
    flags = {"or_resume": True, "dry_run": False}
    words = ["seed=0,1", "total_steps=100"]
    Path("s").mkdir()
    changed = ["sweep.concurrency=1", "time_limit=60", "env.workers=2"]
    plan = plan_sweep([*words, *changed, *FOREIGN])
    begin_sweep("s", plan, None, **flags).write()
    plan = plan_sweep([*words, *FOREIGN])
    assert begin_sweep("s", plan, None, **flags).grid == plan.grid
    plan = plan_sweep([*words, "ppo.lr=0.01", *FOREIGN])
    with pytest.raises(InputError, match=r"overrides: expected .*ppo.lr.*, got \['env"):
        begin_sweep("s", plan, None, **flags)


# Existing runs


SWEPT = ["pooling=max,avg", "env.counts=choice(1-2-0)", "seed=0,1"]


@pytest.fixture
def plan():
    return plan_sweep([*SWEPT, "total_steps=100"])


@pytest.mark.parametrize("time_limit", [None, 60])
@pytest.mark.parametrize("ended", [True, False])
def test_a_job_leaves_trials_alone_that_a_callback_ended(ended, time_limit, capsys):
    plan = plan_sweep([*SWEPT, "total_steps=100", f"time_limit={written(time_limit)}"])
    sweep = Sweep("s", plan.grid, plan.overrides)
    assert not is_done(sweep, plan)
    for trial in plan.trials:
        saved_run(sweep.run_path(trial), trial.config.plain, [10], ended)
    assert is_done(sweep, plan) == ended
    if ended:
        sweep.write()
        assert cli.main(["resume", "s"]) == 0
        assert {row["status"] for row in read_table("s")} == {TrialState.STOPPED}


def test_finished_trials_are_not_trained_again(plan, capsys):
    sweep = Sweep("s", plan.grid, plan.overrides)
    for trial in plan.trials:
        config = trial.config.plain | {"threads": 7, "time_limit": 5}
        score = trial.values["seed"]
        saved_run(sweep.run_path(trial), config, [64, 128], return_mean=score)
    sweep.write()
    written = {f: f.read_bytes() for f in Path("s").rglob("*") if f.is_file()}
    assert cli.main(["resume", "s"]) == 0
    assert "4 finished, 0 to resume, 0 to start" in capsys.readouterr().out
    table = read_table("s")
    assert len(table) == 8
    assert {row["status"] for row in table} == {TrialState.FINISHED}
    assert all(row["return_mean"] == row["seed"] for row in table)
    assert all(file.read_bytes() == content for file, content in written.items())


def test_next_commands_allow_the_plug_ins_of_the_trials(capsys):
    plugin = "helpers.farm:FoxAndHens"
    plan = plan_sweep([f"env={plugin}", "seed=0,1", "total_steps=100"])
    sweep = Sweep("s", plan.grid, plan.overrides)
    for trial in plan.trials:
        saved_run(sweep.run_path(trial), trial.config.plain, [128])
    sweep.write()
    assert cli.main(["resume", "s", "--plugin", plugin]) == 0
    lines = capsys.readouterr().err.splitlines()
    reads = [line for line in lines if "trials/*" in line]
    assert len(reads) == 2
    assert all(line.endswith(f"trials/* --plugin {plugin}") for line in reads)


@yaml_cases("change, message")
def test_a_sweep_whose_settings_changed_is_not_resumed(refused, plan, change, message):
    sweep = Sweep("s", plan.grid, plan.overrides)
    trial = plan.trials[0]
    config = {"verb": "train", **trial.config.plain}
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    Run.create(sweep.run_path(trial), config, config.pop("verb"))
    sweep.write()
    line = refused("resume", "s")
    assert message in line
    assert str(sweep.run_path(trial)) in line


def test_a_run_resumes_from_its_checkpoint(tmp_path):
    run = Run.create(tmp_path / "run", compose("train"))
    assert saved(TRAIN, None) == saved(TRAIN, run) == 0
    for number in range(1, 4):
        run.log({"iteration": number, "env_steps": 10 * number})
    run.close()
    assert saved(TRAIN, run) == 0  # killed before it saved itself
    with run.checkpoint(2) as folder:
        (folder / "progress.json").write_text("{}")
        run.policy_dir.mkdir()
    assert saved(TRAIN, run) == 20
    shutil.rmtree(run.checkpoints()[0])
    assert saved(TRAIN, run) == 30  # it was deleted to free space


# The table


@pytest.fixture
def sweep_with_runs():
    grid = {"pooling": ["max", "avg"], "pooling.query": [None, [0, 1]]}
    combinations = [
        dict(zip(grid, values, strict=True))
        for values in itertools.product(*grid.values())
    ]
    trials = [Trial(trial_name(values), values) for values in combinations]
    sweep = Sweep("s", grid, [])
    saved_run(sweep.run_path(trials[0]), {}, [10, 20], loss=0.5)
    saved_run(sweep.run_path(trials[3]), {}, [10], kl=math.nan)
    status = dict.fromkeys((t.name for t in trials), "waiting")
    status[trials[0].name] = "finished"
    return sweep, trials, status


def test_the_table_has_a_row_for_each_iteration_of_each_trial(sweep_with_runs):
    sweep, trials, status = sweep_with_runs
    sweep.write_table(trials, status)
    table = read_table(sweep.table_path)
    assert len(read_table(sweep.path)) == 3
    columns = ["trial", "status", "pooling", "pooling.query", "iteration", "env_steps"]
    assert list(table[0])[:6] == columns
    assert [[row[column] for column in columns] for row in table] == [
        [trials[0].name, "finished", "max", None, 1, 10],
        [trials[0].name, "finished", "max", None, 2, 20],
        [trials[3].name, "waiting", "avg", "[0,1]", 1, 10],
    ]
    assert [row["loss"] for row in table][:2] == [0.5, 0.5]
    assert math.isnan(table[2]["loss"])
    assert all(math.isnan(row["kl"]) for row in table)
    assert not list(sweep.path.glob(".table*"))


def test_only_json_numbers_of_the_table_are_numbers(tmp_path):
    texts = ["1_000", "010", "+1", "0x1", "1e", "infinity", " 1", "true-ish"]
    numbers = [0, -3, 2.5, -1e-05, 1e300, math.inf, -math.inf]
    values = [*texts, *numbers, True, None]
    sweep = Sweep(tmp_path, {}, [])
    trials = [Trial(f"{n:04d}", {"key": value}) for n, value in enumerate(values)]
    for trial in trials:
        saved_run(sweep.run_path(trial), {}, [1])
    sweep.write_table(trials, dict.fromkeys((t.name for t in trials), "finished"))
    table = read_table(tmp_path)
    assert [row["trial"] for row in table] == [trial.name for trial in trials]
    read = [row["key"] for row in table]
    assert [(type(value), value) for value in read] == [
        (type(value), value) for value in values
    ]


def test_an_empty_table_has_its_columns(tmp_path):
    with pytest.raises(InputError, match=r"table\.csv: no such table"):
        read_table(tmp_path)
    sweep = Sweep(tmp_path, {"seed": [0]}, [])
    sweep.write_table([Trial("seed=0", {"seed": 0})], {"seed=0": "waiting"})
    assert read_table(sweep.table_path) == []
    assert sweep.table_path.read_text() == "trial,status,seed\n"


# Smallest differences that a study can detect


@pytest.mark.parametrize(
    ("seeds", "difference"),
    # Cohen (1988), Table 2.4.1: n for a2 = 0.05 and power 0.80 by d.
    [(394, 0.2), (64, 0.5), (26, 0.8), (17, 1.0)],
)
def test_the_smallest_difference_agrees_with_cohens_table(seeds, difference):
    assert smallest_difference(seeds) <= difference < smallest_difference(seeds - 1)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_the_smallest_difference_is_found_with_80_percent_power(seeds):
    generator = torch.Generator().manual_seed(seeds)
    samples = torch.randn((2, 40_000, seeds), generator=generator, dtype=torch.float64)
    shifted = samples[1] + smallest_difference(seeds)
    significant = stats.ttest_ind(samples[0], shifted, axis=1).pvalue < 0.05
    # Four standard errors.
    assert abs(significant.mean() - 0.8) < 4 * math.sqrt(0.16 / 40_000)


def test_the_smallest_difference_is_given_in_units_of_the_return_if_known():
    smallest = smallest_difference(3)
    text = detectable({"seed": [0, 1, 2]}, 0.5)
    assert f"{smallest:.2f} standard deviations" in text
    assert f"{smallest / 2:.3g} in the return" in text
    assert "in the return" not in detectable({"seed": [0, 1, 2]}, None)
    assert math.isinf(smallest_difference(1))
    for grid in ({"seed": [3]}, {"pooling": ["ada", "max"]}):
        assert "differences between cells cannot be tested" in detectable(grid, 0.1)


def test_the_size_of_the_study_is_printed(plan):
    steps_done = dict(zip((t.name for t in plan.trials), [0, 60, 128, 0], strict=True))
    assert size_of(plan.grid, plan.trials, steps_done, TRAIN).splitlines() == [
        "4 runs: pooling (2) x env.counts (1) x seed (2)",
        "1 finished, 1 to resume, 2 to start",
        "400 steps in total, 240 remaining",
    ]


def test_time_is_estimated_from_whole_iterations_and_whole_runs():
    assert Throughput(steps=64, seconds=2.0).seconds_for(65) == 4.0
    # A run starts once; one that is finished does not.
    assert Throughput(steps=64, seconds=2.0, start=5.0).seconds_for(65) == 9.0
    assert Throughput(steps=64, seconds=2.0, start=5.0).seconds_for(0) == 0.0
    assert "about 2.0 h with 2 at a time" in duration_of([3600.0] * 4, 0, 2)
    assert "about 2.0 h with 4 at a time" in duration_of([7200.0, 60.0], 0, 4)
    assert "without 3 runs that could not be timed" in duration_of([60.0], 3, 1)
    assert duration_of([], 0, 1) == "nothing to do"


@pytest.mark.parametrize(("limit", "duration"), [("null", "2.0 h"), ("1800", "60 min")])
def test_a_time_limit_bounds_the_estimate(monkeypatch, limit, duration):
    monkeypatch.setattr(estimate, "measure", lambda config: Throughput(100, 3600.0))
    plan = plan_sweep(["seed=0,1", "total_steps=100", f"time_limit={limit}"])
    assert f"about {duration} with 1 " in estimate.time_left(plan.trials, {}, 1, TRAIN)


REMOTE = "resources.num_learners=1 resources.num_env_runners=1"


@pytest.mark.parametrize(
    ("overrides", "gpus", "expected"),
    [
        ("resources.num_env_runners=2", 0.5, [(3, 0.5), (1, 0), (1, 0)]),
        ("device=cuda", 0, [(3, 1)]),
        ("device=cuda", 0.25, [(3, 0.25)]),
        ("device=cuda resources.num_gpus_per_learner=0.5", 0, [(3, 0.5)]),
        ("device=cuda resources.num_learners=1", 0, [(3, 1), (1, 0)]),
        (f"device=cuda {REMOTE}", 0, [(3, 0), (1, 0), (1, 0)]),
        ("", 0, [(3, 0)]),
    ],
)
def test_a_trial_takes_what_its_processes_take(overrides, gpus, expected):
    config = TrainConfig.from_plain(compose("train", overrides.split()))
    settings = SweepSettings(cpus_per_trial=3, gpus_per_trial=gpus)
    places = [(place["CPU"], place["GPU"]) for place in bundles(config, settings)]
    assert places == expected


# The table of trials


def test_the_table_shows_changes_and_the_remaining_time():
    stream, time = io.StringIO(), [0.0]
    totals, done = dict.fromkeys("abc", 100), {"a": 128, "b": 0, "c": 0}
    with TrialTable(totals, done, stream=stream, clock=lambda: time[0]) as table:
        table.change("b", TrialState.RUNNING)
        time[0] = 10.0
        table.advance({"b": 50})
        time[0] = 40.0
        table.advance({"b": 80})
        table.change("c", TrialState.FAILED, "no memory")
        assert table.named(TrialState.FAILED) == ["c"]
        table.advance({"b": 128})
        table.change("b", TrialState.FINISHED)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "running  b  0 / 100"
    assert lines[1].startswith("1 waiting, 1 running, 1 finished; 180 / 300 steps")
    assert "2 steps/s  1:00 left" in lines[1]
    assert lines[2] == "failed  c  0 / 100: no memory"
    assert lines[3] == "finished  b  128 / 100  3 steps/s"
    assert lines[4].startswith("2 finished, 1 failed; 200 / 200 steps")


# Trials that end elsewhere


def test_a_trial_that_leaves_no_folder_here_has_failed(plan):
    """As for a trial on another machine without a shared disk."""
    sweep = Sweep("s", plan.grid, plan.overrides)
    remote, local = plan.trials[:2]
    totals = {trial.name: 100 for trial in plan.trials}
    table = TrialTable(totals, dict.fromkeys(totals, 0), stream=io.StringIO())
    scheduler = Scheduler(sweep, plan.settings, table, None, lambda *_: None)
    saved_run(sweep.run_path(local), local.config.plain, [64, 128])
    unfinished = plan.trials[2]
    saved_run(sweep.run_path(unfinished), unfinished.config.plain, [64])
    for trial in (remote, local, unfinished):
        scheduler.end(trial, Outcome(saved=128))
    for trial in (remote, unfinished):
        assert table.rows[trial.name].state == TrialState.FAILED
        assert "its folder is not on this machine" in table.rows[trial.name].note
    assert table.rows[local.name].state == TrialState.FINISHED


def test_damaged_trials_are_named_when_a_sweep_is_resumed(plan, capsys):
    sweep = Sweep("s", plan.grid, plan.overrides)
    first, second = plan.trials[:2]
    for trial in (first, second):
        run = saved_run(sweep.run_path(trial), trial.config.plain, [64])
        with run.checkpoint(2) as folder:
            (folder / "progress.json").write_text("2")
    log = sweep.run_path(first) / "metrics.csv"
    log.write_text(log.read_text().replace("64", "65"))
    (sweep.run_path(second) / "checkpoints/iter_000002/progress.json").write_text("3")
    _report_damage(sweep, plan.trials, plan.trials)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert first.name in lines[0]
    assert "metrics.csv has changed since" in lines[0]
    assert second.name in lines[1]
    assert "continuing from" in lines[1]


@pytest.mark.parametrize("name", ["trials", "trials/a", "table.csv", ".lock"])
def test_parts_of_a_sweep_that_are_links_out_of_it_are_refused(tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    link = tmp_path / "s" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    sweep = Sweep(tmp_path / "s", {}, [])
    with pytest.raises(InputError, match="expected a path inside"), sweep.lock():
        pass
    assert not list(outside.iterdir())
