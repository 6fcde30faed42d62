"""The command: help, refusals, exit codes, and what each verb calls."""

import shutil
import signal
import subprocess
import sys
import types
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

import marl_pool
from helpers.tables import yaml_cases
from helpers.training import run_python
from marl_pool import InputError
from marl_pool.cli import main as cli
from marl_pool.cli.arguments import parse
from marl_pool.cli.help import HELP
from marl_pool.config import compose
from marl_pool.runs.run import Run
from marl_pool.training.settings import CheckpointSettings
from marl_pool.utils.errors import StoppedError

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def provide(monkeypatch):
    """Replace a module that is slow to import with one of only these functions."""

    def put(module: str, **functions) -> None:
        stand_in = types.ModuleType(module)
        vars(stand_in).update(functions)
        monkeypatch.setitem(sys.modules, module, stand_in)

    return put


# The API


def test_the_api_is_listed_and_nothing_else_is_found():
    assert set(marl_pool.__all__) <= set(dir(marl_pool))
    assert all(hasattr(marl_pool, name) for name in marl_pool.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = marl_pool.nothing


# Help and listing


def test_bare_command_and_help_name_every_verb(capsys):
    assert cli.main([]) == 0
    bare = capsys.readouterr().out
    with pytest.raises(SystemExit, match="^0$"):
        cli.main(["--help"])
    assert capsys.readouterr().out == bare
    for verb in HELP:
        assert f"\n    {verb}" in bare


@pytest.mark.parametrize("verb", HELP)
def test_help_of_a_verb_shows_examples(verb, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main([verb, "--help"])
    text = capsys.readouterr().out
    assert f"examples:\n  marl-pool {verb}" in text
    if verb in ("train", "sweep", "evaluate", "diagnose", "render", "report"):
        assert f"marl-pool {verb} --cfg" in text
    if verb == "train":
        assert "pooling=ada|ada_corner|attention_neuron|avg|" in text


def test_the_examples_of_the_help_are_understood(capsys, provide, tmp_path):
    called = []
    provide("marl_pool.training.ppo", train=lambda run, _: called.append(run.path))
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text(
        "from marl_pool.pooling.base import Pooling\n"
        "class MyPool(Pooling):\n"
        "    def __init__(self, dim: int, *, width: int):\n"
        "        super().__init__(dim)\n"
        "    def forward(self, x, padding=None, types=None):\n"
        "        return x[:, 0]\n"
    )
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    examples = text.partition("examples:\n")[2].split("\n")
    for number, line in enumerate(filter(None, map(str.strip, examples))):
        arguments = line.removeprefix("marl-pool ").split()
        assert cli.main([*arguments, "--run-dir", f"run{number}"]) == 0
    assert len(called) == 4


def test_list_describes_every_name(capsys):
    assert cli.main(["list", "pooling"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == marl_pool.pooling_names()
    assert all(len(line.split()) > 3 for line in lines)
    assert cli.main(["list"]) == 0
    everything = capsys.readouterr().out
    for kind in ("pooling:", "envs:", "encoders:", "perturbations:"):
        assert kind in everything
    # Names are a column, however long they are.
    assert cli.main(["list", "pretrained"]) == 0
    lines = capsys.readouterr().out.splitlines()
    width = max(len(line.split()[0]) for line in lines)
    assert all(line[2 + width] == " " != line[3 + width] for line in lines)


def test_cfg_prints_the_composed_config(capsys):
    flags = ["--num-learners", "2", "--address", "10.0.0.1:6379"]
    keys = ["resources.num_learners=2", "resources.address='10.0.0.1:6379'"]
    assert cli.main(["train", "pooling=max", "--cfg", *flags]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed == compose("train", ["pooling=max", *keys])
    # A key is a key, though there is a flag of its name.
    assert cli.main(["train", "storage=s3://x/y", "--cfg"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["storage"] == "s3://x/y"


# Refusals


def test_the_module_refuses_as_the_command_does(tmp_path):
    result = run_python("-m", "marl_pool", "train", "pooling=adda", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("marl-pool: unknown pooling 'adda'")
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["train"], ["train", "pooling=max"]])
def test_training_without_ray_says_what_to_install(refused, monkeypatch, arguments):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert 'pip install "marl-pool[rllib]"' in refused(*arguments)
    assert not list(Path().iterdir())


def test_only_a_missing_extra_is_named_as_one(refused, provide, run_folder):
    def without(module):
        def fail(run, settings, **options):
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

        return fail

    provide("marl_pool.evaluation.video.render", render_run=without("cv2"))
    assert 'cv2: pip install "marl-pool[plots]"' in refused("render", str(run_folder))
    provide("marl_pool.evaluation.video.render", render_run=without("my_own"))
    with pytest.raises(ModuleNotFoundError, match="my_own"):
        cli.main(["render", str(run_folder)])


# Verbs


@pytest.fixture
def run_folder(tmp_path):
    run = Run.create(tmp_path / "trained", compose("train"))
    return run.path


def test_train_makes_a_run_and_prints_where_it_is(capsys, provide):
    def train(run, config):
        assert config.plain == run.config == Run.open(run.path).config
        assert config.env["num_noise"] == 3
        run.metrics_path.touch()

    provide("marl_pool.training.ppo", train=train)
    assert cli.main(["train", "env.num_noise=3", "--run-dir", "here/it"]) == 0
    assert capsys.readouterr().out == "here/it\nhere/it/metrics.csv\n"
    assert cli.main(["train", "env.num_noise=3", "pooling=max", "seed=5"]) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.endswith("-simple_centroid-max-s5")


def test_train_does_not_touch_an_earlier_run(refused, run_folder, provide):
    provide("marl_pool.training.ppo", train=lambda *_: pytest.fail("was called"))
    before = (run_folder / "config.yaml").read_bytes()
    line = refused("train", "--run-dir", str(run_folder))
    assert f"`marl-pool resume {run_folder}`" in line
    assert (run_folder / "config.yaml").read_bytes() == before


def test_a_run_that_never_began_leaves_no_folder(refused, provide):
    def train(run, config):
        raise InputError("encoder.num_heads: expected a divisor of 8, got 3")

    provide("marl_pool.training.ppo", train=train)
    assert "expected a divisor" in refused("train", "--run-dir", "new")
    assert not Path("new").exists()


@pytest.mark.parametrize("path", ["empty", "link", "."])
def test_a_run_that_never_began_leaves_the_users_folder(
    refused, provide, elsewhere, path
):
    def train(run, config):
        raise InputError("encoder.num_heads: expected a divisor of 8, got 3")

    provide("marl_pool.training.ppo", train=train)
    if path != ".":
        Path("empty").mkdir()
    if path == "link":
        Path("link").symlink_to("empty")
    before = {item: item.is_symlink() for item in elsewhere.rglob("*")}
    assert "expected a divisor" in refused("train", "--run-dir", path)
    assert {item: item.is_symlink() for item in elsewhere.rglob("*")} == before


def test_a_folder_that_cannot_be_removed_hides_no_error(refused, provide, monkeypatch):
    def train(run, config):
        monkeypatch.setattr(shutil, "rmtree", Mock(side_effect=PermissionError))
        raise InputError("encoder.num_heads: expected a divisor of 8, got 3")

    provide("marl_pool.training.ppo", train=train)
    assert "expected a divisor" in refused("train", "--run-dir", "new")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("train", "--run-dir=~/a"), "run_dir"),
        (("sweep", "--sweep-dir=~/a"), "sweep_dir"),
        (("evaluate", "r", "--out=~/a"), "out"),
        (("report", "r", "--out=~/a"), "out"),
        (("play", "r", "--export=~/a"), "export"),
        (("train", "--config-dir=~/a"), "config_dir"),
    ],
)
def test_a_tilde_is_the_home_folder_in_every_flag(monkeypatch, words, name):
    monkeypatch.setenv("HOME", "/home/me")
    arguments, _ = parse([*words])
    assert str(getattr(arguments, name)) == "/home/me/a"


@pytest.mark.parametrize("iterations", [0, 1])
def test_a_run_that_failed_later_is_kept(refused, provide, iterations):
    def train(run, config):
        if iterations:
            run.metrics_path.touch()
        raise StoppedError("loss is nan")

    provide("marl_pool.training.ppo", train=train)
    assert "loss is nan" in refused("train", "--run-dir", "new", status=1)
    assert Path("new/config.yaml").is_file()


SIGNALS = [("SIGINT", 130), ("SIGTERM", 143), ("SIGUSR1", 138)]


JOBS = {
    "train": ("marl_pool.training.ppo", "train"),
    "evolve": ("marl_pool.training.evolution.evolve", "evolve"),
    "clone": ("marl_pool.training.cloning.clone", "clone"),
    "fit": ("marl_pool.training.supervised.fit", "fit"),
}
"""Module and function of each verb that makes a run."""


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize("verb", JOBS)
@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_signal_prints_the_resume_command(capsys, provide, verb, number, status):
    before = signal.getsignal(signal.SIGTERM)

    def train(run, config):
        run.metrics_path.touch()
        signal.raise_signal(signal.Signals[number])

    module, function = JOBS[verb]
    provide(module, **{function: train})
    words = {"clone": ["teacher=heuristic"], "fit": ["task=knn_centroid"]}.get(verb, [])
    assert cli.main([verb, *words, "--run-dir", "new"]) == status
    line = "marl-pool: stopped; resume with: marl-pool resume new\n"
    assert capsys.readouterr().err == line
    assert Path("new/config.yaml").is_file()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_an_early_signal_leaves_no_folder(capsys, provide, number, status):
    """Before the first iteration."""

    def train(run, config):
        signal.raise_signal(signal.Signals[number])

    provide("marl_pool.training.ppo", train=train)
    assert cli.main(["train", "--run-dir", "new"]) == status
    assert capsys.readouterr().err == "marl-pool: stopped\n"
    assert not Path("new").exists()


def test_the_same_command_starts_and_continues_a_run(capsys, provide, refused):
    sessions = []

    def train(run, config):
        sessions.append((run.is_unused, config.total_steps, config.time_limit))
        number = len(sessions)
        run.resume_at(number - 1)
        run.log({"iteration": number, "env_steps": 100 * number})
        with run.checkpoint(number, ended=number == 3) as folder:
            (folder / "weights").touch()

    provide("marl_pool.training.ppo", train=train)
    job = ["train", "--run-dir", "job", "--or-resume", "total_steps=200", "seed=3"]
    # An empty folder, or one that was killed before it had a configuration, starts.
    Path("job").mkdir()
    Path("job/.lock").touch()
    assert cli.main([*job, "time_limit=60"]) == 75
    assert "time_limit is over" in capsys.readouterr().err
    # The time limit may change; it continues, then has nothing left to do.
    assert "seed: expected 4, got 3" in refused(*job[:-1], "seed=4")
    line = refused("evolve", *job[1:4])
    assert "expected a run of evolve, got one of train" in line
    assert "--or-resume: expected" in refused("train", "--or-resume")
    assert cli.main(job) == 0
    assert sessions == [(True, 200, 60.0), (False, 200, None)]
    assert cli.main(job) == 0
    assert "200 of 200 steps are done; nothing to do" in capsys.readouterr().out
    assert len(sessions) == 2
    # A callback ends the third session.
    other = ["train", "--run-dir", "other", "--or-resume", "total_steps=1000"]
    assert cli.main(other) == 0
    assert Run.open("other").last_saved_iteration == 3


def test_ctrl_c_ends_an_evaluation_with_status_130(capsys, provide, run_folder):
    def stop(run, settings, env, plugins):
        raise KeyboardInterrupt

    provide("marl_pool.evaluation.evaluate", evaluate_run=stop)
    provide("marl_pool.evaluation.analyses", analyse_run=stop)
    assert cli.main(["evaluate", str(run_folder)]) == 130
    assert capsys.readouterr().err == "marl-pool: stopped\n"


def test_resume_takes_run_control(provide, run_folder):
    configs = []
    provide("marl_pool.training.ppo", train=lambda run, config: configs.append(config))
    before = (run_folder / "config.yaml").read_bytes()
    changes = ["total_steps=5e6", "checkpoint.keep=1", "resources.num_env_runners=2"]
    assert cli.main(["resume", str(run_folder), *changes]) == 0
    assert configs[0].total_steps == 5_000_000
    assert configs[0].checkpoint == CheckpointSettings(every=20, keep=1)
    # Training writes it, once it is known to fit.
    assert (run_folder / "config.yaml").read_bytes() == before


@yaml_cases("override, message")
def test_resume_refuses_anything_else(refused, provide, run_folder, override, message):
    provide("marl_pool.training.ppo", train=lambda *_: pytest.fail("was called"))
    before = (run_folder / "config.yaml").read_bytes()
    assert message in refused("resume", str(run_folder), override)
    assert (run_folder / "config.yaml").read_bytes() == before


def test_resume_of_a_run_that_fails_keeps_it(refused, provide, run_folder):
    def train(run, config):
        raise InputError("no GPU here")

    provide("marl_pool.training.ppo", train=train)
    assert "no GPU here" in refused("resume", str(run_folder))
    assert (run_folder / "config.yaml").is_file()


def test_evaluate_and_render_pass_settings_and_print_paths(capsys, provide, run_folder):
    def evaluate_run(run, settings, env, plugins):
        config = compose("evaluate", ["episodes=3"])
        assert env is config.pop("env") is None
        assert asdict(settings) == config
        assert plugins == ["a.b:C", "d:E"]
        return SimpleNamespace(paths=[run.path / "a"], name=run.path)

    def analyse_run(evaluated, settings):
        assert settings.episodes == 3
        return [evaluated.name / "b"]

    def render_run(run, settings, perturbation, env, plugins):
        assert (env, plugins) == (None, [])
        composed = compose("render", ["perturbation=shuffle", "head=0"])
        assert asdict(settings) | {"perturbation": perturbation, "env": env} == composed
        return run.path / "c"

    allow = ["--plugin", "a.b:C", "--plugin", "d:E"]
    provide("marl_pool.evaluation.evaluate", evaluate_run=evaluate_run)
    provide("marl_pool.evaluation.analyses", analyse_run=analyse_run)
    provide("marl_pool.evaluation.video.render", render_run=render_run)
    assert cli.main(["evaluate", "episodes=3", str(run_folder), *allow]) == 0
    assert cli.main(["render", str(run_folder), "perturbation=shuffle", "head=0"]) == 0
    printed, notes = capsys.readouterr()
    assert printed.split() == [str(run_folder / name) for name in "abc"]
    # The suggested commands allow the same plug-ins.
    assert notes.count("marl-pool render") == 1
    assert notes.count(" --plugin a.b:C --plugin d:E\n") == 2


def test_a_run_folder_may_have_an_equals_sign(capsys, provide, run_folder):
    def evaluate_run(run, settings, env, plugins):
        return SimpleNamespace(paths=[run.path])

    provide("marl_pool.evaluation.evaluate", evaluate_run=evaluate_run)
    provide("marl_pool.evaluation.analyses", analyse_run=lambda *_: [])
    run_folder.rename("lr=0.1")
    assert cli.main(["evaluate", "lr=0.1", "episodes=3"]) == 0
    assert capsys.readouterr().out == "lr=0.1\n"


@pytest.mark.parametrize("verb", ["evaluate", "resume", "show", "export"])
def test_a_missing_run_folder_may_have_an_equals_sign(refused, verb):
    words = ("--to", "torch") if verb == "export" else ()
    line = refused(verb, "sweeps/a/trials/seed=7", *words)
    assert "sweeps/a/trials/seed=7: no such run folder" in line


def test_an_override_may_be_longer_than_a_path(refused):
    rows = ", ".join(["{name: shufle, severities: [1.0]}"] * 20)
    line = refused("evaluate", f"perturbations=[{rows}]")
    assert "unknown perturbation 'shufle'" in line


def test_a_closed_output_pipe_is_no_error():
    listing = f"(sleep 0.5; {sys.executable} -m marl_pool list) | true"
    result = subprocess.run(["bash", "-c", listing], capture_output=True, check=False)
    assert result.stderr == b""


def test_several_policies_without_a_run_are_measured(tmp_path, monkeypatch, capsys):
    from marl_pool.pretrained import pretrained_path

    monkeypatch.chdir(tmp_path)
    names = ("cartpole_feed_forward", "cartpole_attention_neuron")
    paths = [str(pretrained_path(name)) for name in names]
    options = ["perturbations=[{name: shuffle, severities: [1.0]}]", "episodes=2"]
    assert cli.main(["evaluate", *paths, *options, "env.max_steps=5"]) == 0
    assert len(list(tmp_path.glob("evaluations/*/evaluation/results.json"))) == 2
