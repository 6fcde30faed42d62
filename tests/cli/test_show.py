"""Output about runs and names: show, ls, list and help, and what comes next."""

import json
import math
import os
from pathlib import Path

import pytest

from marl_pool.cli import main as cli
from marl_pool.config import compose, files_of
from marl_pool.files.atomic import locked
from marl_pool.files.manifest import sealed_json
from marl_pool.runs.run import CONFIG, Best, Run
from marl_pool.runs.sweep import Sweep

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def printed(capsys):
    def run(*arguments: str) -> str:
        assert cli.main(arguments) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def run():
    """A half-finished run with a policy, an evaluation and TensorBoard events."""
    run = Run.create("runs/half", compose("train", ["total_steps=1000", "seed=7"]))
    run.log({"iteration": 1, "env_steps": 500})
    run.close()
    with run.save_policy_dir(Best(1, -1.5)) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")
    row = {"group": "agent", "mean": -1.25, "perturbation": "clean"}
    document = {"results": [{**row, "policy": "trained"}, {**row, "policy": "random"}]}
    (run.make_evaluation_dir() / "results.json").write_text(json.dumps(document))
    return run


@pytest.fixture
def sweep():
    """The folder of a sweep that has not started."""
    sweep = Sweep("sweeps/one", {"seed": [0]}, [])
    sweep.path.mkdir(parents=True)
    sweep.write()
    return str(sweep.path)


def test_show_has_the_state_results_and_next_step(run, printed):
    text = printed("show", "runs/half")
    assert "simple_centroid, transformer, ada, seed 7" in text
    assert "unfinished, 500 of 1,000 steps" in text
    assert "-1.5 at iteration 1" in text
    assert "agent -1.25, unperturbed (results.json)" in text
    assert "next:       marl-pool resume runs/half\n" in text
    # After an evaluation, the suggested next step is not another one.
    assert "marl-pool evaluate" not in text
    assert "marl-pool report runs/half\n" in text
    (run.evaluation_dir / "results.json").unlink()
    assert "marl-pool evaluate runs/half\n" in printed("show", "runs/half")


def test_an_evaluation_before_more_training_is_marked(run, printed):
    document = {"checkpoint": "best", "iteration": 1}
    path = run.evaluation_dir / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | document))
    assert "older" not in printed("show", "runs/half")
    assert "older" not in printed("ls")
    with run.save_policy_dir(Best(7, -1.0)) as folder:
        (folder / "model.safetensors").write_bytes(b"weights")
    assert (
        "(results.json), an older policy's, of iteration 1, but the best is now 7\n"
        in printed("show", "runs/half")
    )
    assert ", older" in printed("ls")
    assert "next:       marl-pool resume" in printed("show", "runs/half")
    assert "marl-pool evaluate runs/half\n" in printed("show", "runs/half")


def test_an_evaluation_in_another_environment_is_marked(run, printed):
    path = run.evaluation_dir / "results.json"
    document = {"changed": {"num_noise": 3, "arrivals": []}}
    path.write_text(json.dumps(json.loads(path.read_text()) | document))
    assert (
        "agent -1.25, unperturbed (results.json), in another environment "
        "(env.arrivals, env.num_noise)\n" in printed("show", "runs/half")
    )
    assert ", another env" in printed("ls")


def test_a_run_has_failed_if_an_error_is_newer_than_its_checkpoints(run, printed):
    run.write_error("a worker died")
    assert "state:      failed, 500" in printed("show", "runs/half")
    with run.checkpoint(1) as folder:
        (folder / "state").write_bytes(b"weights")
    os.utime(run.error_path, (0, 0))
    assert "state:      unfinished, 500" in printed("show", "runs/half")
    run.write_error("another worker died")
    assert "failed" in printed("ls")


def test_an_edited_configuration_is_reported(run, printed):
    with run.checkpoint(1) as folder:
        (folder / "state").write_bytes(b"weights")
    assert "edited" not in printed("show", "runs/half")
    text = (run.path / CONFIG).read_text()
    (run.path / CONFIG).write_text(text.replace("seed: 7", "seed: 8"))
    edit = f"edited:     {run.path / CONFIG} has changed since iter_000001 was saved"
    assert edit in printed("show", "runs/half")


def test_the_critic_and_an_environment_of_pettingzoo_are_named(printed):
    Run.create("runs/team", compose("train", ["env=simple_spread", "critic=set"]))
    assert "ada, critic set, seed" in printed("show", "runs/team")
    env = {"name": "pettingzoo", "module": "mpe2.simple_spread_v3"}
    Run.create("runs/spread", compose("train", ["seed=3"]) | {"env": env})
    description = "pettingzoo mpe2.simple_spread_v3, "
    assert description in printed("ls")
    assert description in printed("show", "runs/spread")


@pytest.mark.parametrize("content", ["null", '{"results": [{'])
def test_a_damaged_evaluation_is_reported(run, printed, content):
    (run.evaluation_dir / "results.json").write_text(content)
    lines = printed("show", "runs/half").splitlines()
    (line,) = (line for line in lines if "results" in line)
    assert line.endswith(": results.json cannot be read")


def test_a_damaged_score_is_reported(run, printed):
    (run.policy_dir / "best.json").write_text('{"iteration"')
    text = printed("show", "runs/half")
    assert "best.json cannot be read" in text
    assert "500 of 1,000 steps" in text


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "none yet"), ({"mse": 0.25}, "mse 0.25"), ("cut", "cannot be read")],
)
def test_show_of_a_fit_has_its_results(printed, content, expected):
    run = Run.create("runs/fit", compose("fit"), "fit")
    if content is not None:
        document = sealed_json({"task": {}, "mean": content})
        text = content if content == "cut" else json.dumps(document)
        (run.path / "results.json").write_text(text)
    (_, results) = printed("show", "runs/fit").split("results:")
    line = results.splitlines()[0]
    assert expected in line
    assert content is None or "results.json" in line


@pytest.mark.parametrize("verb", ["evaluate", "report", "render", "diagnose"])
def test_for_a_sweep_its_runs_are_named(verb, sweep, refused):
    assert f"its runs are {sweep}/trials/*" in refused(verb, sweep)


def test_a_run_in_training_is_recognized(run, printed):
    with locked(run.path / ".lock", "held"):
        text = printed("show", "runs/half")
    assert "training, 500 of" in text
    assert "marl-pool resume" not in text  # it would be refused


def test_ls_lists_runs_and_names_broken_ones(run, printed, refused):
    Path("sweeps/one/trials/seed=0").mkdir(parents=True)
    Path("sweeps/one/trials/seed=0/config.yaml").write_text("env: [\n")
    text = printed("ls")
    assert "runs/half" in text
    assert "50%" in text
    assert "sweeps/one/trials/seed=0" in text
    assert "cannot be read" in text
    assert "half" in printed("ls", "runs")
    nothing = "sweeps/one/trials/seed=0/nothing"
    assert "expected a folder with runs" in refused("ls", nothing)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (CONFIG, 'a: !!int ""', "config.yaml cannot be read"),
        (CONFIG, "a: !!bool x", "config.yaml cannot be read"),
        ("metrics.csv", "iteration,env_steps\n1,\n", "with the steps so far"),
        ("metrics.csv", "iteration,env_steps\n1,inf\n", "with the steps so far"),
        ("metrics.csv", "iteration\n1\n", "with the steps so far"),
        ("policy/best.json", '{"iteration": 1, "score": null}', "best.json cannot be"),
        ("policy/best.json", '{"iteration": 1, "score": "a"}', "best.json cannot be"),
        (
            "policy/best.json",
            f'{{"iteration": 1, "score": 1{"0" * 400}}}',
            "best.json cannot be",
        ),
    ],
    ids=lambda text: text[-20:],
)
def test_one_odd_run_does_not_hide_the_others(run, capsys, name, text, message):
    odd = Run.create("runs/odd", compose("train"))
    (odd.path / "policy").mkdir()
    if name == CONFIG:
        text += "\n" + (odd.path / CONFIG).read_text()
    (odd.path / name).write_text(text)
    assert cli.main(["ls"]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert "runs/half" in table
    assert message in table
    # Its own description has the rest, if its progress can be read.
    assert cli.main(["show", "runs/odd"]) == (0 if "best" in name else 2)
    assert message in "".join(capsys.readouterr())


@pytest.mark.parametrize("row", [3, [1], {"env_steps": "x"}, {"env_steps": None}])
def test_a_row_in_a_manifest_that_is_none_is_passed_over(run, printed, row):
    with run.checkpoint(1) as folder:
        (folder / "progress.json").write_text("{}")
    file = folder.parent / "iter_000001" / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(sealed_json({**content, "row": row})))
    assert Run.open(run.path).saved() == {"iteration": 1, "env_steps": 500}


def test_a_key_that_is_a_number_is_refused(run, refused):
    (run.path / CONFIG).write_text("1: 2\n" + (run.path / CONFIG).read_text())
    assert "config.yaml: 1: unknown key '1'" in refused("resume", "runs/half")


@pytest.mark.parametrize("score", ["x", [1], True])
def test_a_score_in_a_manifest_that_is_none_is_passed_over(run, score):
    run.policy_dir.joinpath("best.json").unlink()
    with run.checkpoint(1, best=Best(1, 2.0)) as folder:
        (folder / "progress.json").write_text("{}")
    file = folder.parent / "iter_000001" / "manifest.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(sealed_json({**content, "best_score": score})))
    assert Run.open(run.path)._unsaved_best() == (None, "")


def test_show_of_a_sweep_lists_its_runs(sweep, printed):
    Run.create(f"{sweep}/trials/seed=0", compose("train"))
    text = printed("show", sweep)
    assert "trials/seed=0" in text
    assert "unfinished" in text


def test_presets_are_listed_with_a_sentence_and_their_verbs(printed):
    for kind, group in (("suites", "suite"), ("experiments", "experiment")):
        lines = {line.split()[0]: line for line in printed("list", kind).splitlines()}
        assert list(lines) == sorted(files_of(group))
        assert all(len(line.split()) > 3 for line in lines.values())
    for name, verbs in {
        "adapool/table4": "sweep --verb fit",
        "boxworld": "train, sweep",
        "cartpole_clone": "clone",
    }.items():
        assert f" {verbs} " in lines[name]
    assert "perturbations:" in printed("list", "suites", "quick")


def test_help_lists_the_presets_of_a_grid_of_fits(capsys):
    with pytest.raises(SystemExit):
        cli.main(["sweep", "--verb", "fit", "--help"])
    text = capsys.readouterr().out
    assert "experiment=adapool/figure4|" in text
    assert "|boxworld" not in text


def test_the_options_of_one_name_are_listed_with_their_meanings(printed, refused):
    text = printed("list", "pooling", "ada")
    assert (
        "# Number of heads, a divisor of D. [an integer >= 1]\nnum_heads: 1\n" in text
    )
    assert "\ndim:" not in text
    assert "population: 256" in printed("list", "strategies", "cma")
    assert "Did you mean 'ada'?" in refused("list", "pooling", "adda")


def test_help_of_a_verb_is_that_of_its_flag(capsys):
    for arguments in (["help", "train"], ["train", "--help"]):
        with pytest.raises(SystemExit, match="^0$"):
            cli.main(arguments)
    text = capsys.readouterr().out
    assert text[: len(text) // 2] == text[len(text) // 2 :]


@pytest.fixture
def finish(monkeypatch):
    """Replace training with logging one row and saving a policy."""

    def set_outcome(best, env_steps):
        def perform(run, config):
            run.log({"iteration": best.iteration, "env_steps": env_steps})
            run.close()
            with run.save_policy_dir(best) as folder:
                (folder / "model.safetensors").write_bytes(b"weights")

        monkeypatch.setattr("marl_pool.training.jobs.perform", perform)

    return set_outcome


def test_training_ends_with_the_next_step(finish, capsys):
    finish(Best(1, -1.5), env_steps=1_000_000)
    assert cli.main(["evolve", "--run-dir", "new run"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "best checkpoint: -1.5 at iteration 1; took 0:00"
    assert lines[1] == "next: marl-pool evaluate 'new run'"


def test_a_run_without_a_finished_episode_has_no_infinite_return(finish, capsys):
    finish(Best(2, -math.inf), env_steps=4)
    assert cli.main(["train", "experiment=simple_centroid", "--run-dir", "short"]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert (
        first == "best checkpoint: iteration 2, before an episode was over; took 0:00"
    )
    for words in (["show", "short"], ["ls"]):
        assert cli.main(words) == 0
        output = capsys.readouterr().out
        assert "short" in output
        assert "-inf" not in output


def test_a_total_that_is_text_is_one_line_of_the_list(run, printed, refused):
    path = run.path / CONFIG
    path.write_text(path.read_text().replace("total_steps: 1000", "total_steps: 5e6"))
    assert "its configuration is not complete" in printed("ls", "runs")
    assert "its configuration is not complete" in refused("show", "runs/half")
