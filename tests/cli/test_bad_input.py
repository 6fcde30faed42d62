"""Mistakes that once gave a traceback, a wrong message or a late error."""

import io
import resource
import sys
import types
from pathlib import Path

import pytest
import yaml

from helpers.reported import trained, with_policy
from helpers.training import run_python
from marl_pool import __main__ as command
from marl_pool.cli import main as cli
from marl_pool.runs.run import Run

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def run_folder(tmp_path):
    """A run of simple_centroid whose configuration a test may edit."""
    return with_policy(trained(tmp_path / "trained")).path


REFUSALS = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text())


@pytest.mark.parametrize(
    ("verb", "case"),
    [(verb, case) for verb, cases in REFUSALS.items() for case in cases],
)
def test_a_wrong_command_is_refused_in_one_line(refused, verb, case):
    *arguments, message = (text.replace("{nines}", "9" * 5000) for text in case)
    assert message in refused(verb, *arguments)


def test_a_slip_in_one_file_breaks_no_other(refused, capsys):
    Path("mine/suite").mkdir(parents=True)
    Path("mine/suite/slip.yaml").write_text("perturbations: [\n")
    Path("mine/suite/list.yaml").write_text("- 3\n")
    assert cli.main(["evaluate", "--config-dir", "mine", "suite=full", "--cfg"]) == 0
    capsys.readouterr()
    for name, message in (
        ("slip", "mine/suite/slip.yaml cannot be read: line 2"),
        ("list", "list.yaml: expected a mapping of keys, got [3]"),
    ):
        words = ("--config-dir", "mine", "--cfg", f"suite={name}")
        assert message in refused("evaluate", *words)


def test_a_plug_in_that_exits_at_import_is_named(refused):
    Path("leaves.py").write_text("raise SystemExit(3)\n")
    line = refused("train", "pooling=leaves:X")
    assert "'leaves:X' cannot be imported: SystemExit: 3" in line


def test_output_of_other_alphabets_fits_an_ascii_stream(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["train", "--cfg"]) == 0
    stream.flush()
    assert rb"\u03bb of the generalized advantage" in stream.buffer.getvalue()


def test_control_c_during_the_first_imports_is_quiet(monkeypatch, capsys):
    class Interrupted(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "marl_pool.cli.main", Interrupted("main"))
    assert command.main() == 130
    assert capsys.readouterr().err == "marl-pool: stopped\n"


def test_an_environment_of_other_groups_is_refused(refused, run_folder):
    message = refused("evaluate", str(run_folder), "env=simple_tag")
    assert "does not fit the env simple_tag" in message
    assert "expected a policy of 'predator', got agent" in message


def test_a_shipped_policy_that_does_not_fit_is_named(refused):
    words = ("pretrained=cartpole_feed_forward", "env=simple_centroid")
    message = refused("evaluate", *words)
    assert "pretrained=cartpole_feed_forward does not fit the env simple_c" in message
    assert "expected num_features = 4, got 1" in message
    assert not Path("evaluations").exists()


@pytest.mark.parametrize("verb", ["evaluate", "diagnose", "render", "resume"])
def test_an_edited_configuration_is_named_as_its_file(refused, run_folder, verb):
    file = run_folder / "config.yaml"
    file.write_text(file.read_text().replace("num_noise: 3", "num_noise: many"))
    expected = f"{file}: env.num_noise: expected an integer >= 0 or null, got 'many'"
    assert expected in refused(verb, str(run_folder))


@pytest.mark.parametrize(
    "words", ["seed=1 seed=2", "pooling=ada seed=2 pooling=ada", "seed=1 +seed=2"]
)
def test_the_last_value_of_a_key_counts(capsys, words):
    assert cli.main(["train", *words.split(), "--cfg"]) == 0
    printed = capsys.readouterr()
    assert (printed.err, "seed: 2" in printed.out) == ("", True)


@pytest.mark.parametrize("digits", [20, 200])
def test_a_checkpoint_of_a_huge_number_is_ignored(run_folder, refused, capsys, digits):
    number = "9" * digits
    (run_folder / "checkpoints" / f"iter_{number}").mkdir(parents=True)
    (run_folder / "checkpoints" / number).mkdir()
    assert cli.main(["show", str(run_folder)]) == 0
    assert cli.main(["ls", str(run_folder.parent)]) == 0
    assert number not in capsys.readouterr().out
    words = ("evaluate", str(run_folder), "suite=quick", "episodes=1")
    line = refused(*words, f"checkpoint={number}")
    assert f"has no policy {number}; checkpoints: none yet" in line
    assert "has no policy 'last'" in refused(*words, "checkpoint=last")
    # What `resume` continues from.
    assert Run.open(run_folder).latest_checkpoint() is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
def test_a_command_without_memory_ends_in_one_line(run_folder):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))  # below torch's

    words = ("-m", "marl_pool", "evaluate", run_folder)
    result = run_python(*words, preexec_fn=limit)
    assert result.returncode == 1
    assert result.stderr.startswith("marl-pool: out of memory: ")
    assert result.stderr.count("\n") == 1
