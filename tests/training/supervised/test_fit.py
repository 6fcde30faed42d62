"""The trainer of supervised studies, on a task of a few milliseconds."""

import math
import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.line_fit import LineFit
from helpers.paths import ROOT
from helpers.tables import yaml_cases
from marl_pool.cli.main import main
from marl_pool.config import check, compose, plan_sweep
from marl_pool.runs.run import Run
from marl_pool.runs.sweep import Proposal, Sweep
from marl_pool.training.jobs import JOBS, config_of
from marl_pool.training.settings import SweepSettings
from marl_pool.training.supervised.contract import COLUMNS, VALIDATION
from marl_pool.training.supervised.fit import (
    fingerprint,
    fit,
    make_task,
    open_fit,
    price,
    validate_same_data,
)
from marl_pool.training.supervised.learner import (
    ALPHA,
    FoldLearner,
    Means,
    fold_rows,
    must_go_back,
    network_seed,
)
from marl_pool.training.supervised.results import FoldResult, read_results, read_study
from marl_pool.training.supervised.settings import FitConfig, FitSettings
from marl_pool.training.supervised.task import LossAndMetrics
from marl_pool.training.sweep.plan import validate_runs
from marl_pool.training.sweep.schedule import bundles, saved
from marl_pool.utils.errors import InputError, StoppedError
from marl_pool_studies.adapool import knn_centroid

TINY = ("task=helpers.line_fit:LineFit", "encoder=none", "pooling=none", "threads=1")
RESUME = ("resume", "--plugin", "helpers.line_fit:LineFit")
FEW = (*TINY, "fit.epochs=3", "fit.batch_size=8", "fit.lr=0.1")


def plain_config(*overrides: str) -> dict[str, object]:
    return compose("fit", [*FEW, *overrides])


def typed(*overrides: str) -> FitConfig:
    return FitConfig.from_plain(plain_config(*overrides))


def run_of(path: Path, *overrides: str) -> Run:
    return Run.create(path, plain_config(*overrides), "fit")


def fitted(path: Path, *overrides: str) -> Run:
    run = run_of(path, *overrides)
    fit(run, config_of(run))
    run.close()
    return run


def stop_after(run: Run, epochs: int) -> None:
    """Fit a run until some epochs are done."""
    calls = iter(range(100))
    fit(run, config_of(run), should_stop=lambda: next(calls) == epochs)


def learner_of(task: LineFit | None = None, **settings) -> FoldLearner:
    """Make the learner of a task's first fold, by default without noise."""
    task = task or LineFit(noisy=False)
    task.prepare(Path())
    config = FitConfig(task={}, encoder={}, pooling={}, fit=FitSettings(**settings))
    return FoldLearner(task, config, 0)


# Folds


@given(st.integers(4, 200), st.integers(2, 4), st.integers(0, 2**40))
def test_every_example_validates_exactly_one_fold(count, folds, seed):
    settings = FitSettings(folds=folds, batch_size=1, validation_examples=None)
    parts = [fold_rows(count, number, seed, settings) for number in range(folds)]
    union = torch.cat([part.validation for part in parts]).sort().values
    assert union.equal(torch.arange(count))
    for part in parts:
        rows = torch.cat(list(part)).sort().values
        assert rows.equal(torch.arange(count))
    assert fold_rows(count, 0, seed, settings).train.equal(parts[0].train)


def test_one_fold_validates_with_a_share():
    settings = FitSettings(folds=1, validation=0.25, batch_size=1)
    fold = fold_rows(40, 0, 0, settings)
    assert (len(fold.train), len(fold.validation)) == (30, 10)


class Unmeasured(LineFit):
    """A task that measures nothing."""

    def evaluate(self, network, batch, generator):
        return super().evaluate(network, batch, generator)._replace(metrics={})


def test_a_task_that_measures_nothing_is_refused():
    message = "to measure its metric 'squared_error', got nothing"
    with pytest.raises(InputError, match=message):
        learner_of(Unmeasured(), batch_size=10).measure("test", torch.arange(10))


# Schedules


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"warmup": 0.1, "decay": "cosine"}, {0.05: 1, 0.1: 2, 0.55: 1, 1: 0}),
        ({"decay": "drop"}, {0.0: 2, 0.69: 2, 0.7: 0.2, 1: 0.2}),
    ],
)
def test_the_rate_follows_its_schedule(options, rates):
    settings = FitSettings(lr=2.0, **options)
    assert {x: settings.lr_at(x) for x in rates} == pytest.approx(rates)


@pytest.mark.parametrize(
    ("losses", "back"),
    [
        ([5, 4, 3, 2, 1, 9], False),  # the last five were better: 5 is not enough
        ([6, 5, 4, 3, 2, 1, 9], True),  # six were: 6 > max(0.2 · 6, 5)
        ([9, 1, 1, 1, 1, 1, 1, 2], True),  # six of seven, the seventh was worse
        ([9, 9, 1, 1, 1, 1, 1, 2], False),  # five of seven
        ([9, 3, 3, 3, 3, 3, 3, 3], True),  # no worse is enough
        ([9] * 24 + [1] * 6 + [2], False),  # 6 is not more than 0.2 · 30
        ([9] * 24 + [1] * 7 + [2], True),  # 7 is more than 0.2 · 31
    ],
)
def test_back_tracking_counts_the_last_epochs_that_were_no_worse(losses, back):
    assert must_go_back(losses) is back


def transitions(learner: FoldLearner) -> list[torch.Tensor]:
    state = learner.optimizer.state_dict()["state"]
    # A restored state has another order.
    return [entry[name].clone() for entry in state.values() for name in sorted(entry)]


def test_going_back_restores_weights_and_moments_and_lowers_the_rate(tmp_path):
    settings = {"back_tracking": True, "batch_size": 8, "lr": 0.1}
    learner = learner_of(**settings)
    best, moments = {}, []
    for epoch, loss in enumerate([5, 4, 3, 2, 1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]):
        learner.learn(torch.arange(40))
        if epoch == 4:
            best = {k: v.clone() for k, v in learner.network.state_dict().items()}
            moments = transitions(learner)
        if epoch == 10:
            assert not all(map(torch.equal, transitions(learner), moments))
        learner.end_epoch(loss)
        if epoch == 7:  # a resume on the way
            learner.save(tmp_path)
            learner = learner_of(**settings)
            learner.restore(tmp_path)
    assert learner.rate == ALPHA
    assert learner.losses[-2:] == [1.5, 1]  # the best one stands for the last one
    assert moments
    assert all(map(torch.equal, transitions(learner), moments))
    assert all(v.equal(best[k]) for k, v in learner.network.state_dict().items())
    learner.learn(torch.arange(40))
    assert learner.lr == pytest.approx(0.1 * ALPHA)


# Runs


def test_a_fit_learns_and_writes_its_results(tmp_path):
    run = fitted(tmp_path / "run", "fit.epochs=30", "fit.folds=2", "seed=1")
    results = read_results(run.path)
    assert results["mean"]["squared_error"] < 0.05 * results["baselines"]["zero"]
    assert results["parameters"] == 1
    assert [fold["fold"] for fold in results["folds"]] == [0, 1]
    scores = [fold["test"]["squared_error"] for fold in results["folds"]]
    assert results["mean"]["squared_error"] == pytest.approx(sum(scores) / 2)
    spread = abs(scores[0] - scores[1]) / math.sqrt(2)
    assert results["sd_over_folds"]["squared_error"] == pytest.approx(spread)
    x = torch.arange(10).double().add(1).sin() + 1
    assert results["baselines"]["zero"] == pytest.approx(float((3 * x).square().mean()))
    assert results["pictures"] == ["pictures/slope.txt"]
    slope = float((run.path / "pictures" / "slope.txt").read_text())
    assert slope == pytest.approx(3, abs=0.5)
    _, network = open_fit(run)
    assert network[1].weight.item() == slope


def test_the_best_epoch_is_measured_not_the_last(tmp_path):
    run = fitted(tmp_path / "run", "fit.lr=3.0", "fit.epochs=6", "fit.folds=1")
    rows = run.rows()
    best = min(rows, key=lambda row: row["validation_squared_error"])
    (fold,) = read_results(run.path)["folds"]
    assert fold["best_epoch"] == best["epoch"]
    assert fold["validation"] == best["validation_squared_error"]
    assert len({row["validation_squared_error"] for row in rows}) == 6


def test_another_seed_changes_a_run(tmp_path):
    first, reseeded = (
        read_results(fitted(tmp_path / f"{seed}", f"seed={seed}").path)["mean"]
        for seed in (5, 6)
    )
    assert first != reseeded


@pytest.mark.parametrize(
    ("epochs", "back_tracking"),
    [
        *[(9, False), (16, True)],
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(24, False, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, epochs, back_tracking):
    options = (f"fit.back_tracking={back_tracking}", "fit.lr=2.0", "fit.epochs=8")
    reference = fitted(tmp_path / "whole", *options)
    run = run_of(tmp_path / "stopped", *options)
    stop_after(run, epochs)
    assert len(run.rows()) == epochs
    fit(run, config_of(run))
    assert read_results(run.path)["mean"] == read_results(reference.path)["mean"]
    clocks = dict.fromkeys(("seconds", "samples_per_second", "measured_per_second"))
    for row, expected in zip(run.rows(), reference.rows(), strict=True):
        assert row | clocks == expected | clocks


class Unseeded(LineFit):
    """A task whose network samples its weights without a seed."""

    def make_network(self, seed):
        return torch.nn.Sequential(
            torch.nn.Dropout(0.1), torch.nn.Linear(1, 1)
        ).double()


def test_a_network_that_its_task_does_not_seed_is_seeded(tmp_path):
    task = f"task={__name__}:Unseeded"
    reference = fitted(tmp_path / "whole", task)
    run = run_of(tmp_path / "stopped", task)
    stop_after(run, 3)  # all of the first fold
    torch.manual_seed(1)
    fit(run, config_of(run))
    assert read_results(run.path)["mean"] == read_results(reference.path)["mean"]


def test_a_fold_that_ended_is_tested_with_its_last_schedule(tmp_path, monkeypatch):
    evaluate = LineFit.evaluate

    def scheduled(self, network, batch, generator):
        scaled = {**batch, "x": batch["x"] * (1 + self.epoch)}
        return evaluate(self, network, scaled, generator)

    monkeypatch.setattr(LineFit, "evaluate", scheduled)
    reference = fitted(tmp_path / "whole")
    run = run_of(tmp_path / "stopped")
    stop_after(run, 3)  # all of the first fold
    fit(run, config_of(run))
    assert read_results(run.path)["mean"] == read_results(reference.path)["mean"]


def test_the_schedule_is_stretched_to_the_seconds(tmp_path, monkeypatch):
    # The clock advances 1/1000 s per call: a busy machine cannot skip the end.
    clock = SimpleNamespace(now=0.0)

    def tick():
        clock.now += 0.001
        return clock.now

    monkeypatch.setattr("time.perf_counter", tick)
    monkeypatch.setattr("time.monotonic", tick)
    run = fitted(
        tmp_path / "run",
        *("fit.epochs=10_000", "fit.seconds_per_fold=1", "fit.folds=1"),
        "fit.decay=cosine",
    )
    rates = [row["lr"] for row in run.rows()]
    assert rates[0] > 0.09
    assert rates[-1] < 0.01


def first_step(**settings) -> tuple[float, float]:
    """The weight before and after a step on all examples."""
    learner = learner_of(batch_size=40, lr=0.1, **settings)
    weight = learner.network[1].weight
    before = weight.item()
    learner.learn(torch.arange(40))
    return before, weight.item()


def test_gradient_clipping_limits_a_step():
    # Adam divides by the gradient's size: only one near its epsilon shows.
    (start, end), (clipped_start, clipped_end) = (
        first_step(grad_clip=clip) for clip in (None, 1e-9)
    )
    assert abs(clipped_end - clipped_start) < 0.5 * abs(end - start)


@pytest.mark.parametrize(("optimizer", "decay"), [("adam", 0.0), ("adamw", 0.5)])
def test_only_adamw_decays_weights_apart_from_the_gradient(optimizer, decay):
    before, after = first_step(optimizer=optimizer, weight_decay=0.5)
    # Adam's first step has the size of the learning rate, here upwards, towards 3.
    assert after == pytest.approx((1 - 0.1 * decay) * before + 0.1, abs=1e-6)


@pytest.mark.parametrize("mixed", [False, True])
def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(mixed):
    class Single(LineFit):
        def batch(self, split, rows):
            return {k: v.float() for k, v in super().batch(split, rows).items()}

        def make_network(self, seed):
            return super().make_network(seed).float()

    dtypes = []
    learner = learner_of(Single(noisy=False), bfloat16=mixed, batch_size=8)
    learner.network[1].register_forward_hook(lambda *args: dtypes.append(args[2].dtype))
    learner.learn(torch.arange(40))
    learner.measure("test", torch.arange(10))
    assert set(dtypes) == {torch.bfloat16 if mixed else torch.float32}
    assert learner.network[1].weight.dtype == torch.float32


def test_training_uses_the_compiled_network(monkeypatch):
    calls = []

    def compiled(network):
        return lambda x: calls.append(len(x)) or network(x)

    monkeypatch.setattr(torch, "compile", compiled)
    for compile_it in (False, True):
        learner_of(compile=compile_it, batch_size=8).learn(torch.arange(40))
        assert calls == ([8] * 5 if compile_it else [])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_network_learns_the_same(tmp_path):
    options = ("task.noisy=false", "fit.folds=1")  # each fold compiles another
    plain, compiled = (
        fitted(tmp_path / flag, f"fit.compile={flag}", *options)
        for flag in ("false", "true")
    )
    expected = read_results(plain.path)["mean"]["squared_error"]
    error = read_results(compiled.path)["mean"]["squared_error"]
    assert error == pytest.approx(expected, rel=1e-9)


def test_a_nan_loss_stops_the_run_and_keeps_a_checkpoint(tmp_path):
    run = run_of(tmp_path / "run", "task.nan_after=2")
    with pytest.raises(StoppedError, match=r"fold 0: loss is nan, .*; kept .*2"):
        fit(run, config_of(run))
    assert len(run.rows()) == 2


def test_a_metric_that_is_not_finite_is_named(tmp_path, monkeypatch):
    def evaluate(self, network, batch, generator):
        errors = (network(batch["x"]) - batch["y"])[:, 0]
        metrics = {"squared_error": errors.square(), "ratio": errors / 0}
        if network.training:
            del metrics["ratio"]
        return LossAndMetrics(errors.square().mean(), metrics)

    monkeypatch.setattr(LineFit, "evaluate", evaluate)
    run = run_of(tmp_path / "run")
    with pytest.raises(StoppedError, match="fold 0: validation_ratio is [a-z-]+; no"):
        fit(run, config_of(run))


@pytest.mark.parametrize("folds", [1, 2])
def test_a_test_metric_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, folds):
    def batch(self, split, rows):
        x = rows.double().add(1).sin()[:, None] / (split != "test")
        return {"x": x, "y": 3 * x}

    monkeypatch.setattr(LineFit, "batch", batch)
    run = run_of(tmp_path / "run", f"fit.folds={folds}")
    reason = "fold 0: on the test set: squared_error is nan; kept"
    with pytest.raises(StoppedError, match=reason):
        fit(run, config_of(run))
    assert not (run.path / "results.json").exists()


def test_other_test_metrics_that_are_not_finite_are_left_out(
    tmp_path, monkeypatch, capsys
):
    def evaluate(self, network, batch, generator):
        errors = (network(batch["x"]) - batch["y"]).square()[:, 0]
        divisor = 0 if (batch["x"] > 1).any() else 1  # only in the test set
        metrics = {"squared_error": errors, "ratio": (1 + errors) / divisor}
        return LossAndMetrics(errors.mean(), metrics)

    monkeypatch.setattr(LineFit, "evaluate", evaluate)
    run = fitted(tmp_path / "run")
    assert read_results(run.path)["mean"].keys() == {"squared_error"}
    assert "fold 0: on the test set: ratio is inf: left out" in capsys.readouterr().err


def test_a_metric_that_only_some_batches_have_is_refused():
    means, errors = Means(), torch.ones(2)
    means.add({"squared_error": errors})
    reason = "expected squared_error, as in .*, got squared_error, ratio"
    with pytest.raises(InputError, match=reason):
        means.add({"squared_error": errors, "ratio": errors})


@pytest.mark.parametrize(
    ("keep", "way"),
    [(1, "start another run"), (2, "continue from the previous checkpoint")],
)
def test_a_damaged_checkpoint_is_reported(tmp_path, keep, way):
    run = run_of(tmp_path / "run", f"checkpoint.keep={keep}")
    stop_after(run, 2)
    assert len(run.checkpoints()) == keep
    (run.latest_checkpoint() / "learner.json").write_text("{")
    with pytest.raises(StoppedError, match=f"cannot be read: .*{way}"):
        fit(run, config_of(run))


def test_a_run_killed_before_a_folds_result_measures_it_again(tmp_path, monkeypatch):
    complete = fitted(tmp_path / "whole", "fit.lr=2.0")
    run = run_of(tmp_path / "killed", "fit.lr=2.0")
    killed = []

    def die(**result):
        if result["fold"] not in killed:
            killed.append(result["fold"])
            raise MemoryError
        return FoldResult(**result)

    monkeypatch.setattr("marl_pool.training.supervised.fit.FoldResult", die)
    for _ in range(3):
        with pytest.raises(MemoryError):
            fit(run, config_of(run))
    fit(run, config_of(run))
    assert killed == [0, 1, 2]
    clocks = {"seconds": 0}
    folds, reference = (
        [fold | clocks for fold in read_results(source.path)["folds"]]
        for source in (run, complete)
    )
    assert folds == reference


class Stored(LineFit):
    """A task whose factor is in a file of its data."""

    def __init__(self, *, data_dir=None, **options):
        super().__init__(noisy=False, **options)
        self.data_dir, self.factor = Path(data_dir), 0.0

    def prepare(self, folder):
        super().prepare(folder)
        self.factor = float((self.data_dir / "factor").read_text())

    def batch(self, split, rows):
        examples = super().batch(split, rows)
        return {**examples, "y": self.factor * examples["x"]}


def test_a_run_does_not_continue_on_other_data(elsewhere, refused):
    words = ["resume", "run", "--plugin", f"{__name__}:Stored"]
    for name, factor in (("data", 3.0), ("same", 3.0), ("other", 5.0)):
        Path(name).mkdir()
        Path(name, "factor").write_text(str(factor))
    run = run_of(Path("run"), f"task={__name__}:Stored", "data_dir=data")
    stop_after(run, 3)
    run.close()
    # The folder is stored for any working directory.
    stored = run.config["data_dir"]
    assert stored == str(elsewhere / "data")
    line = refused(*words, "data_dir=other")
    assert "data_dir: expected the data of run/checkpoints/" in line
    assert "the mean |y| of the first train rows" in line
    assert Run.open("run").config["data_dir"] == stored
    assert main([*words, "data_dir=same"]) == 0


@pytest.mark.parametrize("content", ['{"fold": 0, "results": []}', '{"data": 3}', "{"])
def test_data_are_compared_only_if_a_checkpoint_describes_them(tmp_path, content):
    (tmp_path / "progress.json").write_text(content)
    validate_same_data(tmp_path, {"num_train": 3}, "task")


class Unusual(LineFit):
    """A task with NumPy's counts, a sparse tensor, a wide loss, and a generator."""

    def prepare(self, folder):
        super().prepare(folder)
        self.num_train, self.num_test = map(np.int64, (self.num_train, self.num_test))

    def batch(self, split, rows):
        return {**super().batch(split, rows), "s": torch.eye(len(rows)).to_sparse()}

    def evaluate(self, network, batch, generator):
        loss, metrics = super().evaluate(network, batch, generator)
        return LossAndMetrics(loss[None], metrics)

    def finish(self, network, folder, generator):
        yield from super().finish(network, folder, generator)


def test_a_task_may_return_what_torch_accepts(tmp_path):
    run = fitted(tmp_path / "run", f"task={__name__}:Unusual")
    results = read_results(run.path)
    usual = read_results(fitted(tmp_path / "usual").path)
    assert results["pictures"]
    assert results["folds"][0]["test"] == usual["folds"][0]["test"]


def test_a_fingerprint_ignores_what_is_random():
    class Random(LineFit):
        def batch(self, split, rows):
            return {**super().batch(split, rows), "z": torch.rand(len(rows))}

    task = Random()
    task.prepare(Path())
    state = torch.get_rng_state()
    names = set(fingerprint(task))
    assert torch.get_rng_state().equal(state)
    assert names == {"num_train", "num_test"} | {
        f"the mean |{name}| of the first {split} rows"
        for name in "xy"
        for split in ("train", "test")
    }


def test_a_fold_ends_after_its_seconds_and_is_counted_to_its_end(tmp_path, capsys):
    run = fitted(tmp_path, "fit.epochs=100_000", "fit.seconds_per_fold=0.05")
    for fold in read_results(run.path)["folds"]:
        assert fold["seconds"] >= 0.05
        assert fold["epochs"] < 100_000
    rows = run.rows()
    settings = FitSettings(**run.config["fit"])
    columns = ("fold", "epoch", "seconds")
    reached = [settings.epochs_over(*map(row.get, columns)) for row in rows]
    assert reached == sorted(reached)
    assert reached[-1] == 300_000 == JOBS["fit"].logged(run)
    folds = [row["fold"] for row in rows]
    assert reached[folds.index(2)] > 200_000
    assert "300,000 / 300,000 epochs" in capsys.readouterr().err
    assert main([*RESUME, str(run.path)]) == 0


def test_the_cost_estimate_counts_folds_epochs_and_tests(tmp_path):
    cost = price(typed("fit.folds=2"), tmp_path)
    assert (cost.folds, cost.epochs, cost.examples) == (2, 3, 30)
    assert cost.seconds > 2 * 3 * 30 / cost.rate
    limited = price(typed("fit.epochs=100_000", "fit.seconds_per_fold=2"), tmp_path)
    endless = price(typed("fit.epochs=100_000"), tmp_path)
    assert 3 * 2 <= limited.seconds < endless.seconds


def test_the_cost_estimate_samples_early_and_late_epochs(tmp_path, monkeypatch):
    calls = []

    def begin_epoch(self, network, epoch, epochs):
        calls.append((epoch, epochs))

    monkeypatch.setattr(LineFit, "begin_epoch", begin_epoch)
    price(typed("fit.epochs=9"), tmp_path)
    assert calls == [(0, 9), (0, 9), (4, 9), (8, 9)]


def test_the_cost_estimate_draws_only_a_preview_of_the_sets(tmp_path, monkeypatch):
    drawn = []

    class CountedSets(knn_centroid.Sets):
        def __init__(self, folder, *, num_samples, **options):
            drawn.append(num_samples)
            super().__init__(folder, num_samples=num_samples, **options)

    monkeypatch.setattr(knn_centroid, "Sets", CountedSets)
    words = ("task=knn_centroid", "scale=paper", "encoder=identity", "pooling=avg")
    cost = price(FitConfig.from_plain(compose("fit", [*words, "threads=1"])), tmp_path)
    assert cost.examples == 720_000
    assert drawn == [knn_centroid.PREVIEW]
    assert not list(tmp_path.iterdir())


# The command line


@yaml_cases("preset, message")
def test_a_wrong_preset_is_refused_in_one_line(tmp_path, refused, preset, message):
    folder = tmp_path / "experiment"
    folder.mkdir()
    if preset:
        (folder / "mine.yaml").write_text(f"{preset}\n")
    words = ["experiment=mine", "--dry-run", "--config-dir", str(tmp_path)]
    assert message in refused("fit", *words)


@yaml_cases("words, message")
def test_a_wrong_command_is_refused_in_one_line(elsewhere, refused, words, message):
    assert message in refused(*words.split())
    assert not list(elsewhere.iterdir())


def test_the_help_of_a_sweep_is_that_of_its_runs(capsys):
    for words, group, hidden_group in (
        ([], "env", "task"),
        (["--verb", "fit"], "task", "env"),
    ):
        with pytest.raises(SystemExit, match="^0$"):
            main(["sweep", *words, "--help"])
        groups = capsys.readouterr().out.partition("group=option")[2]
        groups = groups.partition("examples:")[0]
        assert f"\n  {group}=" in groups
        assert f"\n  {hidden_group}=" not in groups


def test_a_run_ended_by_its_time_limit_is_resumed(tmp_path, capsys):
    path, folder = str(tmp_path / "run"), str(tmp_path / "data")
    assert main(["fit", *FEW, "time_limit=1e-6", "--run-dir", path]) == 0
    expected = (
        f"marl-pool: time_limit is over; resume with: marl-pool resume {path} "
        "--plugin helpers.line_fit:LineFit\n"
    )
    assert expected in capsys.readouterr().err
    words = ["time_limit=1000", "checkpoint.keep=2", f"data_dir='{folder}'"]
    assert main([*RESUME, path, *words]) == 0
    out, err = capsys.readouterr()
    assert "results.json" in out
    assert "resume with" not in err
    assert len(read_results(Path(path))["folds"]) == 3
    assert Run.open(path).config["data_dir"] == folder


def test_names_of_columns_are_reserved(tmp_path):
    metrics = {"loss", LineFit.metric}
    metrics |= {VALIDATION + name for name in metrics}
    assert fitted(tmp_path / "run").rows()[0].keys() - metrics == set(COLUMNS)


@yaml_cases("attribute, value, message")
def test_a_faulty_custom_task_is_refused(
    tmp_path, refused, monkeypatch, attribute, value, message
):
    """The value is an expression; a function of it is called for ``attribute``."""
    monkeypatch.setattr(LineFit, attribute, eval(value))
    path = tmp_path / "run"
    assert message in refused("fit", *FEW, "--run-dir", str(path))
    assert not path.exists()
    if "metric" not in attribute:
        assert message in refused("fit", *FEW, "--dry-run")


def fail(*args, **kwargs):
    raise KeyError("a fault of mine")


@pytest.mark.parametrize(
    "method", ["prepare", "batch", "make_network", "begin_epoch", "evaluate"]
)
def test_an_exception_of_a_custom_task_is_one_line(
    tmp_path, refused, monkeypatch, method
):
    monkeypatch.setattr(LineFit, method, fail)
    path = tmp_path / "run"
    reason = (
        rf"KeyError: 'a fault of mine' \(.*test_fit.py:\d+\), raised by {method} of "
    )
    line = refused("fit", *FEW, "--run-dir", str(path), status=1)
    assert re.search(f"{reason}LineFit; traceback in .*error.txt", line)
    assert "Traceback" in (path / "error.txt").read_text()
    name = "preview" if method == "prepare" else method
    line = refused("fit", *FEW, "--dry-run", status=1)
    assert re.search(reason.replace(method, name) + "LineFit$", line)


@yaml_cases("method, value, message")
def test_numbers_survive_failures_after_the_training(
    tmp_path, capsys, monkeypatch, method, value, message
):
    monkeypatch.setattr(LineFit, method, eval(value))
    run = fitted(tmp_path / "run")
    assert message in capsys.readouterr().err
    results = read_results(run.path)
    assert len(results["folds"]) == 3
    assert not results["pictures" if method == "finish" else "baselines"]
    assert results["baselines" if method == "finish" else "pictures"]


@pytest.mark.parametrize("name", ["clustering_study", "knn_study", "merging_study"])
def test_a_script_refuses_a_missing_folder(tmp_path, capsys, monkeypatch, name):
    script = runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))
    out = str(tmp_path / "nowhere" / "x.png")
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path), "--out", out])
    with pytest.raises(SystemExit, match="^2$"):
        script["main"]()
    assert f"there is no folder {tmp_path / 'nowhere'}" in capsys.readouterr().err


def test_fit_from_the_command_line(elsewhere, capsys):
    pattern = r"about \d+ \w+: 3 folds of at most 3 epochs of 40 examples"
    assert main(["fit", *FEW, "--dry-run"]) == 0
    assert re.match(pattern, capsys.readouterr().out)
    assert not list(elsewhere.iterdir())
    path = str(elsewhere / "run")
    assert main(["fit", *FEW, "--run-dir", path]) == 0
    out = capsys.readouterr().out
    assert re.match(pattern, out)
    assert "1 parameters; test set, mean of 3 folds ± sd over folds" in out
    assert "baseline zero: squared_error" in out
    assert f"{path}/results.json" in out
    assert main([*RESUME, path]) == 0
    assert "9 of 9 epochs are done" in capsys.readouterr().out


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("flag", ["--dry-run", "--run-dir=run"])
def test_a_missing_gpu_is_refused(refused, monkeypatch, count, flag):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    none = "cpu, since torch finds no CUDA device"
    expected = f"one of {count} CUDA devices" if count else none
    err = refused("fit", *FEW, "device=cuda:2", flag)
    assert err == f"marl-pool: device: expected {expected}, got cuda:2\n"


@yaml_cases("overrides, message")
def test_bad_input_is_one_line(tmp_path, refused, overrides, message):
    path = tmp_path / "run"
    keys = {text.partition("=")[0] for text in overrides}
    words = [text for text in FEW if text.partition("=")[0] not in keys]
    assert message in refused("fit", *words, *overrides, "--run-dir", str(path))
    assert not path.exists()


def test_a_finished_fit_refuses_changes_and_other_verbs(tmp_path, refused):
    path = str(fitted(tmp_path / "run").path)
    message = refused("resume", path, "fit.epochs=9")
    assert "fit.epochs: a resumed run takes only" in message
    for verb in ("evaluate", "diagnose", "render", "report"):
        message = refused(verb, path)
        assert "made by fit: its results are in results.json" in message, verb


def test_no_two_folds_share_initial_weights():
    seeds = {network_seed(seed, fold) for seed in range(20) for fold in range(5)}
    assert len(seeds) == 100


def test_sizes_follow_from_task_and_scale_and_can_be_set(tmp_path):
    presets = tmp_path / "own"
    (presets / "task").mkdir(parents=True)
    (presets / "sizes").mkdir()
    (presets / "task" / "my_line.yaml").write_text("name: helpers.line_fit:LineFit\n")
    (presets / "sizes" / "my_line_tiny.yaml").write_text(
        "defaults:\n  - pooling: none\ntask:\n  num_samples: 12\nfit:\n  epochs: 7\n"
    )
    assert compose("fit", ["task=mixture", "sizes=mixture_tiny"])["task"]["num_test"]
    base = ["task=my_line", "encoder=none"]
    tiny = compose("fit", [*base, "scale=tiny"], presets)
    assert (tiny["task"]["num_samples"], tiny["fit"]["epochs"]) == (12, 7)
    assert (tiny["pooling"]["name"], tiny["scale"]) == ("none", "tiny")
    cpu = compose("fit", base, presets)
    assert (cpu["fit"]["epochs"], cpu["scale"]) == (10, "cpu")
    plan = compose("fit", [*base, "scale=tiny", "fit.epochs=2", "pooling=max"], presets)
    assert (plan["fit"]["epochs"], plan["pooling"]["name"]) == (2, "max")


def test_a_custom_task_gets_its_arguments_from_a_checked_configuration():
    assert check("fit", plain_config()).plain == plain_config()
    task = make_task(typed("task.num_samples=7"))
    assert isinstance(task, LineFit)
    assert task.count == 7


def test_the_custom_study_in_the_docs_runs(elsewhere):
    page = (ROOT / "docs" / "fit.md").read_text(encoding="utf-8")
    blocks = [text.partition("```")[0] for text in page.split("```python\n")[1:]]
    Path("my_tasks.py").write_text(blocks[-1])
    options = ["task=my_tasks:Parity", "pooling=max", "fit.epochs=1"]
    small = ["encoder.dim=8", "encoder.num_layers=1", "fit.folds=1", "threads=1"]
    assert main(["fit", *options, *small, "--run-dir", "runs/ada"]) == 0
    assert read_results(Path("runs/ada"))["num_test"] == 1024
    task, _ = open_fit(Run.open("runs/ada"))
    count = task.num_train + task.num_test
    sets = [
        task.batch(split, torch.arange(size))["x"][..., 0]
        for split, size in (("train", task.num_train), ("test", task.num_test))
    ]
    assert len(torch.cat(sets).unique(dim=0)) == count
    scope: dict[str, object] = {}
    exec(compile(blocks[0], "docs/fit.md", "exec"), scope)
    assert not scope["network"].training


# Sweeps


def test_a_finished_run_without_checkpoints_is_not_run_again(tmp_path):
    run = fitted(tmp_path / "run")
    shutil.rmtree(run.path / "checkpoints")
    job = JOBS["fit"]
    assert saved(job, run) == job.total(config_of(run)) == 9
    (run.path / "results.json").unlink()
    assert saved(job, run) == 0


def test_a_trial_on_a_gpu_asks_for_one():
    plain = plain_config()
    on_cpu, on_gpu = map(FitConfig.from_plain, (plain, plain | {"device": "cuda"}))
    for gpus, expected in ((0.0, 1), (0.25, 0.25)):
        settings = SweepSettings(gpus_per_trial=gpus)
        assert bundles(on_gpu, settings) == [{"CPU": 1, "GPU": expected}]
    assert bundles(on_cpu, SweepSettings()) == [{"CPU": 1, "GPU": 0}]


def test_a_resumed_sweep_may_move_its_trials_but_not_change_them(tmp_path):
    plan = plan_sweep(["task.k=1,2", "seed=3"], verb="fit")
    sweep = Sweep(tmp_path, plan.grid, plan.overrides, verb="fit")
    trial = plan.trials[0]
    moved = {"device": "cuda", "data_dir": "there", "threads": 7, "download": True}
    run = Run.create(sweep.run_path(trial), trial.config.plain | moved, "fit")
    validate_runs(sweep, plan)
    run.write_config({**trial.config.plain, "seed": 4})
    with pytest.raises(InputError, match="seed: expected 3, got 4"):
        validate_runs(sweep, plan)


@pytest.mark.parametrize("dry_run", [False, True])
def test_trials_share_data_which_a_dry_run_deletes(tmp_path, monkeypatch, dry_run):
    folders = set()

    def note(sweep, plan, dry_run):
        folders.update(Path(trial.config.data_dir) for trial in plan.trials)
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "sets").write_text("")
        return {}

    monkeypatch.setattr("marl_pool.training.sweep.run.run_sweep", note)
    path = tmp_path / "sweep"
    flags = ["--dry-run"] if dry_run else []
    command = ["sweep", "--verb", "fit", *TINY[:3], "seed=0,1", "--sweep-dir"]
    assert main([*command, str(path), *flags]) == 0
    (folder,) = folders
    assert folder.exists() is not dry_run
    assert path.exists() is not dry_run


def test_a_sweep_refuses_a_missing_gpu(elsewhere, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    err = refused("sweep", "--verb", "fit", *TINY[:3], "seed=0,1", "device=cuda")
    assert "device: expected cpu, since torch finds no CUDA device, got cuda (" in err
    assert not list(elsewhere.iterdir())


def test_the_table_shows_swept_keys_of_any_section(tmp_path, capsys):
    sweep = Sweep(tmp_path, {"fit.lr": [0.1, 0.2], "seed": [0]}, [], verb="fit")
    for lr in sweep.grid["fit.lr"]:
        fitted(tmp_path / "trials" / f"fit.lr={lr},seed=0", f"fit.lr={lr}")
    sweep.write()
    script = runpy.run_path(str(ROOT / "scripts" / "fit_table.py"))
    capsys.readouterr()
    assert script["main"]([str(tmp_path)]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| fit.lr | seed | parameters | epochs | s a fold | square")
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[:4] for row in cells] == [[lr, "0", "1", "3"] for lr in ("0.1", "0.2")]
    means = read_results(tmp_path / "trials" / "fit.lr=0.2,seed=0")["mean"]
    assert cells[1][-1].startswith(f"{means['squared_error']:.4g} ± ")
    fitted(tmp_path / "trials" / "a stranger", "fit.lr=0.3")
    assert len(script["table"](tmp_path, None)) == 4
    assert script["main"]([str(tmp_path), "--metrics", "error"]) == 2
    assert "expected of squared_error, got error" in capsys.readouterr().err


def test_the_table_shows_the_proposals_of_a_search(tmp_path, capsys):
    space = {"fit.lr": ["uniform", 0.1, 0.2]}
    sweep = Sweep(tmp_path, {}, [], verb="fit", space=space)
    fitted(tmp_path / "trials" / "0001", "fit.lr=0.2")
    sweep.write()
    sweep.write_proposals([Proposal({"fit.lr": lr}) for lr in (0.1, 0.2)])
    script = runpy.run_path(str(ROOT / "scripts" / "fit_table.py"))
    head, _, row = script["table"](tmp_path, None)
    assert head.startswith("| fit.lr | parameters |")
    assert row.startswith("| 0.2 | 1 | 3 |")


def test_learning_curves_refuse_a_missing_sweep(tmp_path, capsys, monkeypatch):
    script = runpy.run_path(str(ROOT / "scripts" / "study_curves.py"))
    words = ["study_curves", "/nowhere", "--facet=pooling", "--out"]
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "z.png")])
    with pytest.raises(SystemExit, match="^2$"):
        script["main"]()
    assert "study_curves: error: /nowhere" in capsys.readouterr().err


def test_what_holds_no_study_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"expected finished runs of fit, got none"):
        read_study(tmp_path)
    fitted(tmp_path / "run")
    assert list(read_study(tmp_path)) == [tmp_path / "run"]
    with pytest.raises(InputError, match=r"run: expected a run of task=images, got"):
        read_study(tmp_path, ["images"])
    fitted(tmp_path / "second", f"task={__name__}:Unseeded")
    assert len(read_study(tmp_path)) == 2
    tasks = ["helpers.line_fit:LineFit", f"{__name__}:Unseeded"]
    with pytest.raises(
        InputError, match="expected runs of one task, got helpers.* and"
    ):
        read_study(tmp_path, tasks)
