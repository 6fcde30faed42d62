"""Untrusted text: in a terminal, a shell, a spreadsheet and a picture."""

import csv
import json
import math
import shlex
import subprocess
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marl_pool import utils
from marl_pool.cli import main as cli
from marl_pool.cli.common import resume_command
from marl_pool.config import plan_sweep
from marl_pool.evaluation.results import Result, write_csv
from marl_pool.files.figures import figure_style, new_figure, to_svg
from marl_pool.files.manifest import is_intact_json, sealed_json
from marl_pool.files.tables import read_csv
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import Sweep, Trial, read_table
from marl_pool.training.supervised.results import read_results
from marl_pool.training.sweep.folder import begin_sweep
from marl_pool.utils.errors import InputError
from marl_pool.utils.text import HIDDEN, cell, printable, quoted, uncell

NASTY = ["=1+1", "+1 a", "-x", "@SUM(A1)", "\tx", "\rx", "=HYPERLINK(1)", "＝1", "'=x"]
SHELL = "run$(touch OWNED)`touch OWNED`;touch OWNED"


@given(st.text())
def test_a_cell_is_no_formula_and_reads_back(text):
    written = cell(text)
    assert uncell(written) == text
    first = written[:1]
    number = written == text and not written.startswith("'")
    if first and first in "=+-@\t\r":
        assert number
        float(written)


@pytest.mark.parametrize("text", NASTY)
def test_what_a_spreadsheet_would_compute_is_quoted(text):
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize("value", [-1.5, 3, -7, math.inf, "-1.5", "+2e5", "a=b", "", 0])
def test_numbers_and_plain_text_stay(value):
    assert cell(value) == value


@given(st.text())
def test_what_is_printed_is_one_line_without_control_characters(text):
    line = printable(text)
    assert len(line.splitlines()) <= 1
    assert not any(unicodedata.category(character) in HIDDEN for character in line)


def test_printed_resume_command_quotes_the_path(tmp_path):
    """A quoted name that holds a command substitution stays a plain name."""
    assert shlex.split(quoted(SHELL)) == [SHELL]
    line = resume_command(Path(SHELL))
    words = shlex.split(line)
    assert words == ["marl-pool", "resume", SHELL]
    done = subprocess.run(
        ["sh", "-c", f"printf %s {quoted(SHELL)}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout == SHELL
    assert not list(tmp_path.iterdir())


def begin_again(path: Path) -> None:
    flags = {"or_resume": False, "dry_run": True}
    Sweep(path, {"seed": [0, 1]}, []).write()
    begin_sweep(path, plan_sweep(["seed=0,1"]), None, **flags)


def create_again(path: Path) -> None:
    for _ in range(2):
        Run.create(path, {})


@pytest.mark.parametrize("refuse", [create_again, begin_again, read_results])
def test_a_suggested_command_quotes_the_path(tmp_path, refuse):
    path = tmp_path / "my $(touch x)"
    path.mkdir()
    with pytest.raises(InputError) as caught:
        refuse(path)
    command = str(caught.value).rpartition("marl-pool resume ")[2].rstrip("`")
    assert shlex.split(command) == [str(path)]


def test_an_error_is_one_line_whatever_a_path_holds(tmp_path, capsys):
    path = tmp_path / "a\nb\x1b[2J\u202ec"
    assert cli.main(["resume", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert r"a\nb\x1b[2J\u202ec" in error


def test_tables_of_results_hold_no_formula(tmp_path):
    path = tmp_path / "results.csv"
    result = Result("=group", "trained", False, "clean", "+label", -0.5, mean=-1.25)
    write_csv(path, [result], {"run": "=cmd()", "env": {"name": "x"}})
    with path.open(newline="") as lines:
        (raw,) = csv.DictReader(lines)
    assert raw["run"] == "'=cmd()"
    assert raw["group"] == "'=group"
    assert (raw["label"], raw["mean"]) == ("'+label", "-1.25")
    (read,) = read_csv(path)
    assert (read["run"], read["group"]) == ("=cmd()", "=group")


def test_the_table_of_a_sweep_reads_back_what_was_quoted(tmp_path):
    values = {"env": "=1+1", "ppo.lr": -3}
    trial = Trial("=trial", values)
    sweep = Sweep(tmp_path, {key: [value] for key, value in values.items()}, [])
    run = Run.create(sweep.run_path(trial), {"seed": 0})
    run.metrics.log({"iteration": 1, "=loss": -0.5})
    sweep.write_table([trial], {"=trial": "finished"})
    assert sweep.table_path.read_text().splitlines() == [
        "trial,status,env,ppo.lr,iteration,'=loss",
        "'=trial,finished,'=1+1,-3,1,-0.5",
    ]
    (row,) = read_table(tmp_path)
    expected = {"trial": "=trial", "status": "finished", **values}
    assert row == {**expected, "iteration": 1, "=loss": -0.5}


def test_dollar_signs_in_a_picture_are_dollar_signs():
    pytest.importorskip("matplotlib")
    with figure_style():
        figure = new_figure(3, 2)
        title = figure.suptitle(f"{SHELL} $x^{{$ \\")
        assert f"{SHELL} $x^{{$ \\" in to_svg(figure).replace("&gt;", ">")
    assert not title.get_parse_math()


# Seals


def test_json_without_a_seal_is_taken_as_it_is():
    assert is_intact_json({"a": 1})


@given(
    st.dictionaries(
        st.text(),
        st.floats(allow_nan=False) | st.integers() | st.text() | st.none(),
        max_size=4,
    )
)
def test_sealed_json_is_intact_after_a_file_and_not_after_a_change(content):
    content.pop("sha256", None)
    reread = json.loads(json.dumps(sealed_json(content)))
    assert is_intact_json(reread)
    assert not is_intact_json({**reread, "more": 1, "content": 2})


@pytest.mark.parametrize("name", ["print_line", "print_note"])
def test_a_message_that_nobody_can_read_is_lost(monkeypatch, name):
    def refuse(line: str) -> None:
        raise BrokenPipeError

    stream = SimpleNamespace(write=refuse, flush=lambda: None)
    monkeypatch.setattr("sys.stderr", stream)
    getattr(utils.text, name)("the run is saved")
