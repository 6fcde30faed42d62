"""Diagnoses: recorded observations, measurements and written files."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from helpers.farm import FoxAndHens
from helpers.tables import yaml_cases
from marl_pool.cli import main as cli
from marl_pool.envs import make_batched_env
from marl_pool.evaluation.target import to_float64
from marl_pool.networks.set_network import SetNetwork
from marl_pool.policies import make_policy
from marl_pool.policies.base import Policy
from marl_pool.policies.random_policy import RandomPolicy
from marl_pool.policies.storage import save_policies
from marl_pool.pooling import POOLING
from marl_pool.pooling.base import Pooling
from marl_pool.runs.run import Run
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool_studies.adapool.diagnosis import theory
from marl_pool_studies.adapool.diagnosis.measures import (
    CHUNK,
    GroupObservations,
    measure_head,
    record_observations,
)
from marl_pool_studies.adapool.diagnosis.plot import plot_diagnoses
from marl_pool_studies.adapool.diagnosis.records import (
    ALL,
    Diagnosis,
    from_plain,
    print_table,
    to_plain,
)
from marl_pool_studies.adapool.diagnosis.run import compare, diagnose, diagnose_run
from marl_pool_studies.adapool.diagnosis.settings import DiagnoseSettings

ENV: dict[str, Any] = {"name": "simple_centroid", "num_noise": 4, "max_steps": 6}
SETTINGS = DiagnoseSettings(episodes=3, threads=1)
SPEC = TokenSpec(6, 4, ("self", "friend", "noise"))
ENCODER = {"name": "transformer", "dim": 8, "num_layers": 1, "num_heads": 2}


def network(pooling: Any, **encoder: Any) -> SetNetwork:
    """An untrained network in float64, with weights large enough to matter."""
    part = {"name": pooling} if isinstance(pooling, str) else pooling
    parts = {"encoder": {**ENCODER, **encoder}, "pooling": part}
    return SetNetwork(SPEC, **parts, init_std=0.8, seed=3).double().eval()


def random_observations(
    rows: int = 40, *, padded: bool = True, agents: int = 2
) -> GroupObservations:
    """Random sets: self and friends are signal, most others noise."""
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(rows, 6, 4, generator=generator)
    types = torch.randint(1, 3, (rows, 6), generator=generator)
    types[:, 0] = 0
    padding = torch.rand(rows, 6, generator=generator) < (0.3 if padded else 0)
    padding[:, 0] = False
    features[padding] = torch.nan
    signal, episodes = (types < 2) & ~padding, torch.arange(rows) // agents
    return GroupObservations(Tokens(features, types, padding), signal, episodes)


def policy(pooling: Any) -> Policy:
    return policies_of(make_batched_env(num_envs=1, **ENV), pooling, 0.4)["agent"]


def policies_of(env: Any, pooling: Any = "avg", std: float = 0.01) -> dict[str, Policy]:
    """Untrained policies of all groups."""
    options = {"pooling": pooling, "init_std": std, "seed": 1}
    return {
        name: make_policy(group.tokens, group.action_space, **options)
        for name, group in env.groups.items()
    }


# Observations


class Changing(FoxAndHens):
    """The signal is another token at each step, and the first hen dies."""

    def signal(self) -> dict[str, Tensor]:
        place = (self.steps + self.env_ids) % 4
        mask = torch.arange(4) == place[:, None, None]
        # Expanded rows share their memory, so nobody may write into the mask.
        return {
            name: mask.expand(-1, group.num_agents, -1)
            for name, group in self.groups.items()
        }

    @property
    def active(self) -> dict[str, Tensor]:
        living = super().active
        living["hen"][:, 0] = self.steps < 4
        return living

    def advance(self, actions: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        living = self.active["hen"]
        rewards, terminated = super().advance(actions)
        return {**rewards, "hen": rewards["hen"] * living}, terminated


class Slow(Changing):
    simulated = True


def toy_target(kind: type[FoxAndHens], **options: Any) -> Any:
    """A target of random policies in toy environments."""

    def make_env(count: int, first: int = 0) -> FoxAndHens:
        return kind(count, first_env=first, seed=1, **options)

    policies = {
        name: RandomPolicy(group.action_space) for name, group in kind(1).groups.items()
    }
    return SimpleNamespace(make_env=make_env, policies=policies)


def test_signal_and_tokens_are_of_the_same_moment() -> None:
    """Also where environments end at different times: the mask tells the step."""
    observed = record_observations(toy_target(Changing, end_chance=0.2), 7, 1000)["fox"]
    env = Changing(7, seed=1, end_chance=0.2)
    env.reset()
    start = env.observe()["fox"].features[:, 0]
    lengths = observed.episodes.bincount()
    assert len(lengths.unique()) > 1
    for number, length in enumerate(lengths.tolist()):
        rows = observed.episodes == number
        torch.testing.assert_close(observed.tokens.features[rows][0], start[number])
        steps = (observed.signal[rows].int().argmax(1) - number) % 4
        assert steps.tolist() == [step % 4 for step in range(length)]
    assert observed.signal.sum(1).eq(1).all()


def test_only_agents_that_live_are_observed() -> None:
    observed = record_observations(toy_target(Changing, end_chance=0.0), 5, 1000)
    assert len(observed["fox"].episodes) == 5 * 12
    assert len(observed["hen"].episodes) == 5 * (12 * 2 + 4)
    assert observed["hen"].episodes.unique().tolist() == list(range(5))


@pytest.mark.parametrize(
    ("most", "steps"), [(60, 4), (45, 3), (40, 2), (15, 1), (10**9, 12)]
)
def test_too_many_steps_are_thinned_to_every_nth(most: int, steps: int) -> None:
    observed = record_observations(toy_target(Changing, end_chance=0.0), 5, most)["fox"]
    assert observed.episodes.bincount().tolist() == [steps] * 5


def test_fewer_than_one_step_of_all_is_refused() -> None:
    message = r"max_observations: expected at least 15, .*14"
    with pytest.raises(InputError, match=message):
        record_observations(toy_target(Changing), 5, 14)
    with pytest.raises(UnfitTokensError, match="does not define .* of 'fox'"):
        record_observations(toy_target(FoxAndHens), 2, 100)


def test_simulators_play_a_few_at_a_time() -> None:
    def by_episode(kind: type[FoxAndHens]) -> tuple[Tensor, Tensor]:
        observed = record_observations(toy_target(kind), 40, 10**6)["hen"]
        order = observed.episodes.argsort(stable=True)
        return observed.episodes[order], observed.signal[order]

    torch.testing.assert_close(by_episode(Slow), by_episode(Changing))


# Measurements


@pytest.mark.parametrize("padded", [False, True])
def test_numbers_are_those_of_the_formulas_one_by_one(padded: bool) -> None:
    net = network({"name": "ada", "num_heads": 4})
    observed = random_observations(padded=padded)
    numbers = measure_head(net, observed).numbers
    x, _, _ = net.encode(observed.tokens)
    weights, query = net.weights(observed.tokens), x[:, 0]
    assert weights is not None
    attention = net.pooling.attention
    for row, present in enumerate(~observed.tokens.padding):
        vectors, signal = x[row, present], observed.signal[row, present]
        for head in range(4):
            part = slice(2 * head, 2 * head + 2)
            share = weights[row, head, present]
            residuals = vectors[:, part] - share @ vectors[:, part]
            best = vectors[signal, part].mean(0)
            keys = vectors @ attention.to_key.weight[part].T
            scores = keys @ attention.to_query.weight[part] @ query[row] / 8**0.5
            expected = {
                "signal_loss": residuals[signal].square().mean(),
                "excess": (share @ vectors[:, part] - best).square().mean(),
                "mean_excess": (vectors[:, part].mean(0) - best).square().mean(),
                "signal_weight": share[signal].sum(),
                "self_weight": share[0],
                "signal_width": scores[signal].max() - scores[signal].min(),
                "signal_error": (1 / signal.sum() - share[signal]).mean(),
                "violations": torch.tensor(0.0),
            }
            if not signal.all():
                expected["margin"] = scores[signal].min() - scores[~signal].max()
                expected["noise_error"] = -share[~signal].mean()
            for name, value in expected.items():
                actual = numbers[name][row, head]
                torch.testing.assert_close(actual, value.double(), msg=name)


def test_nothing_under_padding_matters() -> None:
    net, observed = network("ada"), random_observations()
    features = observed.tokens.features.nan_to_num(7.0)
    filled = observed._replace(tokens=observed.tokens._replace(features=features))
    reference, measures = (measure_head(net, case) for case in (observed, filled))
    for name, values in reference.numbers.items():
        torch.testing.assert_close(values, measures.numbers[name], equal_nan=True)
    assert reference.numbers["excess"].isfinite().all()


def test_parts_of_many_observations_are_put_together() -> None:
    net, observed = network("ada"), random_observations(2 * CHUNK + 3)
    combined, last = measure_head(net, observed), list(observed.split(CHUNK))[2]
    assert combined.numbers["excess"].shape == (2 * CHUNK + 3, 1)
    margin = measure_head(net, last).numbers["margin"]
    tail = combined.numbers["margin"][2 * CHUNK :]
    torch.testing.assert_close(tail, margin, equal_nan=True)


def test_all_signal_leaves_no_margin_and_no_violation() -> None:
    observed = random_observations()
    observed = observed._replace(signal=~observed.tokens.padding)
    numbers = measure_head(network("ada"), observed).numbers
    for name in ("margin", "distance", "noise_width", "noise_error", "noise_low"):
        assert numbers[name].isnan().all(), name
    for name in ("signal_low", "signal_error", "signal_high", "excess"):
        assert numbers[name].isfinite().all(), name
    assert not numbers["violations"].any()


def test_the_mean_of_all_has_the_excess_of_average_pooling() -> None:
    numbers = measure_head(network("avg"), random_observations()).numbers
    torch.testing.assert_close(numbers["excess"], numbers["mean_excess"])


def test_max_pooling_is_measured_by_its_own_vector() -> None:
    net, observed = network("max"), random_observations()
    numbers = measure_head(net, observed).numbers
    x, padding, types = net.encode(observed.tokens)
    pooled = net.pooling(x, padding, types)
    x = x.masked_fill(observed.tokens.padding[..., None], 0.0)
    expected = theory.excess_loss(x, pooled, observed.signal, heads=8)
    torch.testing.assert_close(numbers["excess"], expected)
    assert not {"margin", "violations"} & set(numbers)


def test_a_class_token_is_no_token_of_the_set() -> None:
    net, observed = network("cls"), random_observations()
    cases = measure_head(net, observed)
    x, _, _ = net.encode(observed.tokens)
    assert x.shape[1] == 7
    pairs = zip(x, observed.signal, strict=True)
    best = torch.stack([row[1:][signal].mean(0) for row, signal in pairs])
    excess = (x[:, 0] - best).square().mean(1)
    torch.testing.assert_close(cases.numbers["excess"][:, 0], excess)
    assert "signal_weight" not in cases.numbers
    present = ~observed.tokens.padding
    torch.testing.assert_close(cases.moments.num_tokens, present.sum(1).double())
    variance = x[:, 1:][present].var(0, correction=0).mean()
    torch.testing.assert_close(theory.variance(cases.moments)[0], variance)


class ExtraToken(Pooling):
    """A head whose extra token takes half of the weight."""

    extra_tokens = 1

    def weights(self, x: Tensor, padding: Any = None, types: Any = None) -> Tensor:
        weights = torch.full_like(x[:, None, :, 0], 0.5 / (x.shape[1] - 1))
        weights[..., 0] = 0.5
        return weights

    def forward(self, x: Tensor, padding: Any = None, types: Any = None) -> Tensor:
        return theory.pool(x, ExtraToken.weights(self, x))


class ThreeHeads(ExtraToken):
    def weights(self, x: Tensor, padding: Any = None, types: Any = None) -> Tensor:
        return super().weights(x).expand(-1, 3, -1)


def test_the_weight_of_an_extra_token_stays_in_the_result() -> None:
    net = network(f"{__name__}:ExtraToken", num_layers=1)
    observed = random_observations(padded=False)
    numbers = measure_head(net, observed).numbers
    x, _, _ = net.encode(observed.tokens)
    expected = theory.excess_loss(x[:, 1:], net(observed.tokens), observed.signal)
    torch.testing.assert_close(numbers["excess"], expected)
    share = observed.signal.sum(1, keepdim=True) / 12
    torch.testing.assert_close(numbers["signal_weight"], share.double())


# Summaries


def first_observations(count: int, repeats: int = 1) -> GroupObservations:
    """One observation of each environment, ``repeats`` of which count as an episode."""
    env = make_batched_env(num_envs=count, **ENV)
    env.reset()
    tokens = env.observe()["agent"].flatten_batch()
    episodes = torch.arange(count) // repeats
    return GroupObservations(tokens, env.signal()["agent"][:, 0], episodes)


def test_a_summary_holds_means_over_heads_and_observations() -> None:
    player = to_float64({"agent": policy({"name": "ada", "num_heads": 4})})["agent"]
    net = player.network
    observed = first_observations(20, repeats=4)
    rows = diagnose("agent", player, observed)
    assert [row.head for row in rows] == [ALL, "0", "1", "2", "3"]
    summary, heads = rows[0], rows[1:]
    cases = measure_head(net, observed)
    x = net.encode(observed.tokens)[0].detach()
    variance = x.flatten(0, 1).var(0, correction=0).mean()
    assert summary.variance == pytest.approx(float(variance))
    excess = cases.numbers["excess"] / variance
    assert summary.excess == pytest.approx(float(excess.mean()))
    assert [row.excess for row in heads] == pytest.approx(excess.mean(0).tolist())
    assert summary.margin == pytest.approx(np.mean([row.margin for row in heads]))
    positive = (cases.numbers["margin"] > 0).double().mean(0)
    assert [row.margin_positive for row in heads] == positive.tolist()
    width = cases.numbers["signal_high"] - cases.numbers["signal_low"]
    assert summary.signal_bound_width == pytest.approx(float(width.mean()))
    assert (summary.checked, summary.violations) == (20 * 4 * 8, 0)
    assert (summary.num_signal, summary.num_tokens, summary.uniform_weight) == (
        4,
        8,
        0.5,
    )
    assert (summary.episodes, summary.observations, summary.heads) == (5, 20, 4)
    assert summary.excess_low < summary.excess < summary.excess_high
    assert summary.pooling == "ada"


def test_the_interval_draws_whole_episodes() -> None:
    """Ten copies of each episode's observation give the same interval as one."""
    player = to_float64({"agent": policy("avg")})["agent"]
    single_copy = first_observations(12)
    rows = torch.arange(12).repeat(10)
    signal, episodes = single_copy.signal[rows], single_copy.episodes[rows]
    copies = GroupObservations(single_copy.tokens.at(rows), signal, episodes)
    independent_copies = copies._replace(episodes=torch.arange(120))
    single, repeated, independent = (
        np.array([row.excess_low, row.excess_high])
        for case in (single_copy, copies, independent_copies)
        for row in diagnose("agent", player, case)
    )
    assert repeated == pytest.approx(single)
    assert np.ptp(independent) < 0.6 * np.ptp(single)


def diagnosis_of(pooling: Any) -> list[Diagnosis]:
    """An untrained policy's diagnosis."""
    observed = first_observations(2)
    return diagnose("agent", to_float64({"a": policy(pooling)})["a"], observed)


def test_the_heads_that_are_measured_are_those_of_the_document() -> None:
    measured = {name for name in POOLING if not diagnosis_of(name)[0].missing}
    weighted = {"ada", "avg", "gated", "hopfield", "pma", "set2set"}
    assert measured == {"cls", "max"} | weighted


@yaml_cases("pooling, reason")
def test_an_unsuitable_head_is_a_gap_with_its_reason(pooling: Any, reason: str) -> None:
    (row,) = diagnosis_of(pooling)
    with pytest.raises(UnfitTokensError, match=reason):
        raise UnfitTokensError(row.missing)
    assert np.isnan([row.excess, row.margin, row.signal_loss]).all()
    assert row.checked == 0


def test_a_policy_that_pools_nothing_is_a_gap() -> None:
    group = make_batched_env(num_envs=1, **ENV).groups["agent"]
    (row,) = diagnose("agent", RandomPolicy(group.action_space), random_observations())
    assert row.pooling == "RandomPolicy"
    assert row.missing == "expected a policy with a pooling head, got RandomPolicy"


# Runs


def make_run(folder: Path, pooling: Any = "ada") -> Run:
    run = Run.create(folder, {"env": ENV, "seed": 5})
    save_policies({"one": policy(pooling)}, {"agent": "one"}, run.policy_dir)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path / "run")


def content_of(paths: list[Path]) -> dict[str, Any]:
    (document,) = (path for path in paths if path.suffix == ".json")
    content: dict[str, Any] = json.loads(document.read_text())
    return content


def test_a_run_is_diagnosed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    paths = diagnose_run(run, SETTINGS)
    folder = run.path / "evaluation"
    names = ["diagnosis.csv", "diagnosis.json", "diagnosis.png"]
    assert paths == [folder / name for name in names]
    content = content_of(paths)
    assert (content["env"], content["training_seed"], content["seed"]) == (ENV, 5, 0)
    summary = content["rows"][0]
    assert (summary["head"], summary["violations"], summary["observations"]) == (
        ALL,
        0,
        18,
    )
    assert summary["checked"] == 18 * summary["heads"] * 8
    with paths[0].open(newline="") as file:
        lines = list(csv.DictReader(file))
    excess = [row["excess"] for row in content["rows"]]
    assert [float(line["excess"]) for line in lines] == excess
    assert json.loads(lines[0]["env"]) == ENV
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert f"0 of {summary['checked']:,}" in output
    assert f"{summary['excess']:.3f}" in output


def test_an_earlier_diagnosis_stays_and_an_evaluation_does_not_number_it(run) -> None:
    (run.path / "evaluation").mkdir()
    (run.path / "evaluation" / "results.csv").touch()
    first = diagnose_run(run, SETTINGS)
    before = [path.read_bytes() for path in first]
    second = diagnose_run(run, replace(SETTINGS, seed=1))
    names = [f"diagnosis-2.{kind}" for kind in ("csv", "json", "png")]
    assert [path.name for path in second] == names
    assert [path.read_bytes() for path in first] == before
    assert content_of(first)["rows"] != content_of(second)["rows"]
    repeat = diagnose_run(run, SETTINGS)
    assert content_of(repeat) == content_of(first)


def test_groups_that_did_not_learn_are_left_out(tmp_path: Path) -> None:
    env = {"name": "simple_tag", "prey": "learned", "max_steps": 4}
    policies = policies_of(make_batched_env(num_envs=1, **env))
    for fixed, expected in (
        ({}, {"predator", "prey"}),
        ({"prey": "runs/elsewhere"}, {"predator"}),
    ):
        config = {"env": env, "seed": 0, "fixed": fixed}
        run = Run.create(tmp_path / f"run{len(fixed)}", config)
        save_policies(policies, {name: name for name in policies}, run.policy_dir)
        rows = content_of(diagnose_run(run, SETTINGS))["rows"]
        assert {row["group"] for row in rows} == expected


def test_a_policy_that_separates_perfectly_has_no_excess(tmp_path: Path) -> None:
    """Scores that the type alone decides, far apart: weights 1/k and 0."""
    player = to_float64({"a": policy({"name": "ada", "num_heads": 1})})["a"]
    net = player.network
    with torch.no_grad():
        for layer in net.encoder.layers:
            for part in (layer.attention.to_out, layer.feedforward[2]):
                nn.init.zeros_(part.weight)
        table = torch.zeros_like(net.embedding.types.weight)
        table[[0, 2], 0] = 1.0  # self and signal
        net.embedding.types.weight.copy_(table)
        nn.init.zeros_(net.embedding.project.weight)
        net.embedding.project.weight[0, 4] = 10.0  # GELU keeps it
        net.embedding.project.weight[1:5, :4] = torch.eye(4)
        for part in (net.pooling.attention.to_query, net.pooling.attention.to_key):
            nn.init.zeros_(part.weight)
            part.weight[0, 0] = 1.0
    observed = first_observations(9)
    (row,) = diagnose("agent", player, observed)
    assert row.margin_positive == 1.0
    assert row.margin == pytest.approx(100 / 8**0.5)
    assert row.excess < 1e-12 < row.mean_excess
    assert row.signal_weight == pytest.approx(1.0)
    assert max(row.signal_bound_width, row.noise_bound_width) < 1e-12


# Several runs, and the command


def test_several_runs_are_compared(tmp_path: Path, capsys: Any) -> None:
    heads = ["ada", "cls", "flatten"]
    runs = [make_run(tmp_path / name, name) for name in heads]
    documents = [diagnose_run(run, SETTINGS)[1] for run in runs]
    assert "not measured: flatten: expected" in capsys.readouterr().out
    out = tmp_path / "compared"
    paths = compare(documents, str(out))
    names = [f"diagnosis.{kind}" for kind in ("csv", "json", "png")]
    assert [path.name for path in paths] == names
    content = content_of(paths)
    assert [row["run"] for row in content["rows"]] == heads
    assert {row["head"] for row in content["rows"]} == {ALL}
    # A gap is written, shown and drawn.
    gap = content["rows"][2]
    assert gap["excess"] is None
    assert re.match("expected .*attention weights, got Flatten", gap["missing"])
    assert [entry["run"] for entry in content["runs"]] == heads
    output = capsys.readouterr().out
    assert "not measured: flatten" in output
    assert f"{content['rows'][1]['excess']:.3f}" in output
    with pytest.raises(InputError, match="compared exists"):
        compare(documents, str(out))


def test_rows_survive_being_written() -> None:
    row = Diagnosis("a", "ada", ALL, heads=2, excess=0.5, margin=-1.0, checked=3)
    read = from_plain(json.loads(json.dumps(to_plain(row))))
    assert to_plain(read) == to_plain(row)
    assert np.isnan(read.signal_loss)
    assert (read.excess, read.checked) == (0.5, 3)


def test_the_table_leaves_out_what_no_head_has(capsys: Any) -> None:
    row = Diagnosis("a", "avg", ALL, heads=1, excess=0.25, num_signal=1, num_tokens=3)
    print_table([("one", row)], "a title")
    output = capsys.readouterr().out
    assert "1 of 3" in output
    assert "0.250" in output
    assert "M > 0" not in output
    print_table([("one", row), ("two", replace(row, checked=9, margin=-2.5))], "both")
    output = capsys.readouterr().out
    assert "-2.50" in output
    assert output.count("0 of 9") == 1


def test_a_bound_beyond_the_mean_by_rounding_is_drawn(tmp_path: Path) -> None:
    """A percentile of equal resamples may be off by the last bit."""
    row = Diagnosis("a", "avg", ALL, heads=1, num_signal=1, num_tokens=3, excess=0.3)
    above = replace(row, excess_low=np.nextafter(0.3, 1), excess_high=0.3)
    below = replace(row, excess_low=0.3, excess_high=np.nextafter(0.3, 0))
    gap = Diagnosis("a", "flatten", ALL, missing="no weights")
    for rows in ([("a", above), ("b", below), ("c", row)], [("flatten", gap)]):
        plot_diagnoses(rows, tmp_path / "p.png", "a title")
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
        (tmp_path / "p.png").unlink()


def test_one_episode_has_no_interval(run: Run, capsys: Any) -> None:
    paths = diagnose_run(run, replace(SETTINGS, episodes=1))
    assert [path.suffix for path in paths] == [".csv", ".json", ".png"]
    for row in content_of(paths)["rows"]:
        assert row["excess"] > 0
        assert row["excess_low"] is row["excess_high"] is None
    assert "nan" not in capsys.readouterr().out


def test_numbers_are_written_when_a_picture_fails(run, monkeypatch, capsys) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise ValueError("no\nfonts")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    paths = diagnose_run(run, SETTINGS)
    folder = run.path / "evaluation"
    assert paths == [folder / "diagnosis.csv", folder / "diagnosis.json"]
    assert sorted(folder.iterdir()) == paths
    assert content_of(paths)["rows"]
    assert "no plot: ValueError: no fonts" in capsys.readouterr().out
    compared = compare([paths[1]] * 2, str(run.path / "compared"))
    assert [path.name for path in compared] == ["diagnosis.csv", "diagnosis.json"]


def test_the_command_diagnoses_one_run_and_several(elsewhere, refused, capsys) -> None:
    first, second = (make_run(elsewhere / name, name) for name in ("ada", "avg"))
    options = ["episodes=2", "threads=1"]
    assert cli.main(["diagnose", str(first.path), "env.num_noise=2", *options]) == 0
    folder = first.path / "evaluation"
    paths = [str(folder / f"diagnosis.{kind}") for kind in ("csv", "json", "png")]
    assert capsys.readouterr().out.splitlines()[-3:] == paths
    # Another environment has another ratio.
    (summary, *_) = json.loads(Path(paths[1]).read_text())["rows"]
    assert (summary["num_signal"], summary["num_tokens"]) == (4, 6)
    command = ["diagnose", str(first.path), str(second.path), *options]
    assert cli.main([*command, "--out", "table"]) == 0
    assert "table/diagnosis.png" in capsys.readouterr().out
    assert "table exists; choose another --out" in refused(*command, "--out", "table")
    assert len(list((second.path / "evaluation").iterdir())) == 3
    words = ["env=simple_centroid", *options, "--out", "b"]
    assert cli.main(["diagnose", str(second.policy_dir), *words]) == 0
    assert Path("b/evaluation/diagnosis.json").is_file()


@yaml_cases("change, expected")
def test_runs_of_different_tasks_are_refused(tmp_path, refused, change, expected):
    """Before anything is played."""
    env = {**ENV, "reward_scale": 1.0}
    for name, config in (("one", env), ("other", {**env, **change})):
        run = Run.create(tmp_path / name, {"env": config, "seed": 5})
        save_policies({"one": policy("avg")}, {"agent": "one"}, run.policy_dir)
    paths = [str(tmp_path / name) for name in ("one", "other", "out")]
    assert expected in refused("diagnose", *paths[:2], "--out", paths[2])
    assert not Path(paths[2]).exists()
    assert not list(tmp_path.glob("*/evaluation"))


@yaml_cases("change, message")
def test_bad_settings_are_one_line_and_write_nothing(run, refused, change, message):
    assert message in refused("diagnose", str(run.path), change)
    assert not (run.path / "evaluation").exists()


def test_an_env_without_signal_is_one_line(tmp_path: Path, refused: Any) -> None:
    name = "helpers.farm:FoxAndHens"
    policies = policies_of(FoxAndHens(1))
    run = Run.create(tmp_path / "run", {"env": {"name": name}, "seed": 0})
    save_policies(policies, {name: name for name in policies}, run.policy_dir)
    assert refused("diagnose", str(run.path), "--plugin", name) == (
        "marl-pool: FoxAndHens does not define the signal tokens of 'fox': it has no "
        "signal_types\n"
    )
