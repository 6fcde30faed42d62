"""Evolution: strategies, populations in the same environments, exact resume."""

import json
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box
from hypothesis import given
from hypothesis import strategies as st

from helpers.paths import ROOT
from helpers.tables import yaml_cases
from helpers.wind_env import WindEnv
from marl_pool import InputError
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.evaluation.results import CLEAN
from marl_pool.files.reading import read_npz
from marl_pool.policies import make_agent
from marl_pool.policies.agent import load_vector, to_vector
from marl_pool.policies.storage import load_policy, save_policy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run, default_path
from marl_pool.tokens import TokenSpec
from marl_pool.training.evolution.evaluator import MAX_ENVS, Evaluator, PopulationTask
from marl_pool.training.evolution.evolve import BEST, SEARCH, evolve, start_vector
from marl_pool.training.evolution.pgpe import PGPE, centered_ranks
from marl_pool.training.loop import TrainingLoop
from marl_pool.training.settings import EvolveConfig
from marl_pool.utils.errors import StoppedError
from marl_pool.utils.randomness import VALIDATION_ENVS
from marl_pool_studies.attention_neuron.published import published_for

cma_es = pytest.importorskip("cma") and pytest.importorskip(
    "marl_pool.training.evolution.cma_es"
)
CMAES = cma_es.CMAES

STRATEGIES = {
    "cma": partial(CMAES, population=16, sigma0=0.3),
    "diagonal": partial(CMAES, population=16, sigma0=0.3, diagonal=True),
    "pgpe": partial(PGPE, population=16, std=0.3),
    "adaptive": partial(PGPE, population=16, std=0.3, std_lr=0.2, std_decay=0.01),
}
TINY = (
    *("evolution.population=6", "repetitions=3", "total_generations=6"),
    *("validation.every=2", "validation.episodes=4", "checkpoint.every=2"),
    *("env=helpers.wind_env:WindEnv", "policy=feed_forward", "policy.hidden=[3]"),
    "threads=1",
)
SET_AGENT = "policy=helpers.set_agent:SetAgent"
CHANNEL = ("channel",)
PATCHES = TokenSpec(256, 144, ("patch",), has_self=False, dtype="uint8")
ROUNDING = {"rtol": 1e-3, "atol": 1e-3}
"""Sums in another order, over some steps of an unstable system."""
TIMES = ("seconds", "generations_per_second", "rollouts_per_second")


def fitness(vectors):
    return -(vectors - 1).square().sum(1)


def search(strategy, first, last):
    """Let a strategy learn from generations; return what it drew."""
    drawn = []
    for generation in range(first, last + 1):
        vectors = strategy.ask(generation)
        drawn.append(vectors.clone())
        strategy.tell(vectors, fitness(vectors))
    return drawn


def tiny_run(*overrides, path=None):
    """A run of a tiny configuration, not yet begun."""
    config = compose("evolve", [*TINY, *overrides])
    return Run.create(path, config, "evolve")


def finished_run(path, *overrides):
    run = tiny_run(*overrides, path=path)
    evolve(run, run.config)
    run.close()
    return run


def results(run):
    """Rows without times, and all of the newest checkpoint's arrays."""
    rows = [
        {name: repr(value) for name, value in row.items() if name not in TIMES}
        for row in run.rows()
    ]
    with np.load(run.latest_checkpoint() / SEARCH) as arrays:
        return rows, {name: array.tolist() for name, array in arrays.items()}


# Strategies


each_strategy = pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 5) for name in STRATEGIES),
        ("pgpe", 310),
        pytest.param("cma", 310, marks=pytest.mark.slow),
    ],
)


@each_strategy
def test_a_strategy_climbs(name, size):
    strategy = STRATEGIES[name](torch.zeros(size))
    before = float(fitness(strategy.favourite[None]))
    search(strategy, 1, 60)
    share = 0.1 if size == 5 else 0.95
    assert float(fitness(strategy.favourite[None])) > share * before
    assert strategy.favourite.shape == (size,)
    assert strategy.step_size > 0


@pytest.mark.parametrize(("size", "population"), [(5, 16), (225, 6)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_that_was_saved_goes_on_exactly(tmp_path, name, size, population):
    """From some 200 parameters on, BLAS rounds by the order of a matrix in memory."""
    start, options = torch.zeros(size), {"population": population, "seed": 3}
    whole, part = (STRATEGIES[name](start, **options) for _ in range(2))
    search(whole, 1, 12)
    file = tmp_path / SEARCH
    np.savez(file, allow_pickle=False, **whole.state_dict())
    part.load_state_dict(read_npz(file))
    assert torch.equal(part.favourite, whole.favourite)
    assert part.step_size == whole.step_size
    pairs = zip(search(whole, 13, 40), search(part, 13, 40), strict=True)
    assert all(torch.equal(expected, actual) for expected, actual in pairs)
    assert torch.equal(part.favourite, whole.favourite)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("population", [3, 4])
def test_a_tiny_population_goes_on_exactly(population, diagonal):
    """Tiny populations mirror their worst vectors, and know which were mirrors."""
    options = {"population": population, "diagonal": diagonal, "sigma0": 0.5}
    for until in range(1, 9):
        whole, part = (CMAES(torch.zeros(10), **options) for _ in range(2))
        search(whole, 1, until)
        part.load_state_dict(whole.state_dict())
        ends = [search(strategy, until + 1, 12) for strategy in (whole, part)]
        assert all(map(torch.equal, *ends)), until


@pytest.mark.parametrize("name", STRATEGIES)
def test_one_seed_fixes_a_strategy_and_another_changes_it(name):
    first, repeat, reseeded = (
        search(STRATEGIES[name](torch.zeros(4), seed=seed), 1, 3) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, repeat, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, reseeded, strict=True))
    assert not torch.equal(first[0] - first[0].mean(0), first[1] - first[1].mean(0))


@pytest.mark.parametrize("name", ["cma", "pgpe"])
def test_a_strategy_leaves_global_generators_alone(name):
    numpy_state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    search(STRATEGIES[name](torch.zeros(4)), 1, 3)
    assert (np.random.get_state()[1] == numpy_state).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_cma_learns_the_diagonal_only_of_many_parameters(monkeypatch):
    monkeypatch.setattr(cma_es, "FULL_UP_TO", 10)
    assert not CMAES(torch.zeros(10), population=4).diagonal
    many = CMAES(torch.zeros(11), population=4)
    assert many.diagonal
    assert all(array.size <= 11 for array in many.state_dict().values())
    assert not CMAES(torch.zeros(11), population=4, diagonal=False).diagonal


def test_cma_moves_its_mean_by_the_learning_rate():
    start = torch.full((4,), 0.5)
    whole, part = (CMAES(start, population=8, mean_lr=rate) for rate in (1.0, 0.25))
    for strategy in (whole, part):
        search(strategy, 1, 1)
    moved = whole.favourite - start
    assert moved.abs().max() > 0.01
    torch.testing.assert_close(part.favourite - start, 0.25 * moved)


def test_cma_draws_each_number_of_a_generation_once(monkeypatch):
    """Two-point step-size adaptation draws further numbers than the population's."""
    places = []

    def counted(self, generation, rows, first):
        places.extend((generation, first + row) for row in range(rows))
        return gaussian(self, generation, rows, first)

    gaussian = CMAES.gaussian
    monkeypatch.setattr(CMAES, "gaussian", counted)
    search(STRATEGIES["diagonal"](torch.zeros(310)), 1, 4)
    assert len(places) == len(set(places))
    # 14 new vectors a generation, and at least one draw besides.
    assert max(row for _, row in places) > 14


def test_pgpe_draws_mirrored_pairs():
    strategy = STRATEGIES["pgpe"](torch.ones(5))
    plus, minus = strategy.ask(1).chunk(2)
    torch.testing.assert_close(plus + minus, torch.full_like(plus, 2.0))
    deviation = torch.cat([strategy.ask(g) - 1 for g in range(200)]).std()
    assert deviation == pytest.approx(0.3, rel=0.05)


def test_pgpe_slows_down_and_narrows_as_it_is_told():
    rates = {"lr": 0.1, "lr_decay": 1.0, "std": 0.4, "std_decay": 1.0}
    strategy = PGPE(torch.zeros(3), population=4, **rates)
    places = [strategy.favourite]
    for generation in range(1, 4):
        search(strategy, generation, generation)
        assert strategy.step_size == pytest.approx(0.4 / (1 + generation))
        places.append(strategy.favourite)
    first = (places[1] - places[0]).abs()
    torch.testing.assert_close(first, torch.full_like(first, 0.1))  # as Adam begins
    # No step of Adam is longer than lr · (1 - b1) / sqrt(1 - b2).
    last = (places[3] - places[2]).abs().max()
    assert last <= 0.1 / 3 * (1 - 0.9) / (1 - 0.999) ** 0.5


def test_pgpe_keeps_its_floor_and_changes_by_a_fifth_at_most():
    wild = PGPE(torch.zeros(3), population=4, std=1.0, std_lr=1e6)
    search(wild, 1, 1)
    assert set(wild.std.tolist()) <= {0.8, 1.2, 1.0}
    floored = PGPE(torch.zeros(3), population=4, std=0.1, std_decay=1.0, std_floor=0.08)
    search(floored, 1, 3)
    assert floored.std.tolist() == [0.08] * 3


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=12))
def test_centered_ranks_depend_on_the_order_alone(values):
    fitness = torch.tensor(values, dtype=torch.float64)
    ranks = centered_ranks(fitness)
    assert torch.equal(ranks, centered_ranks(fitness.exp() * 3 - 7))
    assert abs(float(ranks.sum())) < 1e-9
    assert ranks.abs().max() <= 0.5
    for rank, value in zip(ranks, fitness, strict=True):
        assert (ranks[fitness == value] == rank).all()
    if len(set(values)) == len(values):
        assert (ranks.min(), ranks.max()) == (-0.5, 0.5)


# Environments


def test_environments_of_one_number_play_the_same_episode():
    options = {"noise_channels": 2, "seed": 5}
    env = make_batched_env("cartpole", 4, **options)
    env.renumber(torch.tensor([3, 8, 3, 8]), episode=6)
    single = make_batched_env("cartpole", 1, first_env=8, first_episode=6, **options)
    for instance in (env, single):
        instance.reset()
    for _ in range(3):
        features = env.observe()["agent"].features
        assert torch.equal(features[:2], features[2:])
        assert not torch.equal(features[0], features[1])
        assert torch.equal(features[1], single.observe()["agent"].features[0])
        env.step({"agent": torch.zeros(4, 1, 1)})
        single.step({"agent": torch.zeros(1, 1, 1)})


def test_an_environment_with_levels_in_stock_forgets_them():
    env = make_batched_env("boxworld", 2)
    env.reset()
    env.renumber(torch.tensor([5, 5]), episode=2)
    env.reset()
    fresh = make_batched_env("boxworld", 1, first_env=5, first_episode=2)
    fresh.reset()
    features = env.observe()["agent"].features
    assert torch.equal(features[0], features[1])
    assert torch.equal(features[0], fresh.observe()["agent"].features[0])


# Populations


def make_evaluator(*overrides):
    return Evaluator(EvolveConfig.from_plain(compose("evolve", overrides)))


def cartpole_agents(*overrides, count=5):
    evaluator = make_evaluator("env.max_steps=40", "repetitions=6", *overrides)
    vector = to_vector(evaluator.agent)
    noise = torch.randn(count, len(vector), generator=torch.Generator().manual_seed(0))
    return evaluator, vector + 0.3 * noise


def test_all_members_meet_the_same_episodes_and_each_generation_new_ones():
    evaluator, vectors = cartpole_agents(count=1)
    env = {"name": "cartpole", "max_steps": 40}
    same = vectors.repeat(4, 1)
    first, second = (
        evaluator.play(same, PopulationTask(torch.arange(6), episode, env)).returns
        for episode in (1, 2)
    )
    torch.testing.assert_close(first, first[:1].expand(4, -1), **ROUNDING)
    assert len(set(first[0].tolist())) == 6
    assert (first - second).abs().min() > 0.01


@pytest.mark.parametrize("policy", ["sensory", "feed_forward"])
def test_a_population_plays_as_its_members_do_one_by_one(policy):
    evaluator, vectors = cartpole_agents(f"policy={policy}")
    task = PopulationTask(torch.arange(6), 3, {"name": "cartpole", "max_steps": 40})
    together = evaluator.play(vectors, task)
    evaluator.max_envs = 6
    apart = evaluator.play(vectors, task)
    torch.testing.assert_close(together.returns, apart.returns, **ROUNDING)
    assert torch.equal(together.lengths, apart.lengths)
    numbers = {"first_episode": 3, "seed": 0, "first_env": 0}
    env = make_batched_env("cartpole", 6, max_steps=40, **numbers)
    load_vector(evaluator.agent, vectors[2])
    episodes = Rollout(env, {"agent": evaluator.agent}).episodes()
    assert torch.equal(apart.returns[2], episodes.returns["agent"][:, 0])
    assert torch.equal(apart.lengths[2], episodes.lengths)


def test_an_agent_with_attention_plays_as_its_members_do_one_by_one():
    evaluator, vectors = cartpole_agents(SET_AGENT, count=4)
    task = PopulationTask(torch.arange(6), 3, {"name": "cartpole", "max_steps": 20})
    together = evaluator.play(vectors, task)
    evaluator.max_envs = 6
    apart = evaluator.play(vectors, task)
    torch.testing.assert_close(together.returns, apart.returns, **ROUNDING)
    assert len(set(apart.returns.sum(1).tolist())) == 4


def test_an_agent_of_ones_own_with_attention_is_evolved(tmp_path):
    base = [option for option in TINY if not option.startswith("policy")]
    run = Run.create(tmp_path, compose("evolve", [*base, SET_AGENT]), "evolve")
    evolve(run, run.config)
    assert len(run.rows()) == 6
    run.close()


def test_a_perturbation_is_the_same_for_all_members():
    evaluator, vectors = cartpole_agents("perturbation=shuffle", count=1)
    task = PopulationTask(torch.arange(6), 1, {"name": "cartpole", "max_steps": 40})
    returns = evaluator.play(vectors.repeat(3, 1), task).returns
    torch.testing.assert_close(returns, returns[:1].expand(3, -1), **ROUNDING)
    plain, _ = cartpole_agents("policy=feed_forward")
    shuffled, w = cartpole_agents("policy=feed_forward", "perturbation=shuffle")
    assert not torch.equal(plain.play(w, task).returns, shuffled.play(w, task).returns)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30), st.integers(1, 4))
def test_chunks_cover_all_and_fit(members, episodes, most, processes):
    evaluator = Evaluator.__new__(Evaluator)
    evaluator.max_envs = most
    covered = torch.zeros(members, episodes)
    chunks = list(evaluator.chunks(members, episodes, processes))
    for piece in chunks:
        covered[piece] += 1
        assert 0 < covered[piece].numel() <= most
    assert (covered == 1).all()
    assert len(chunks) >= min(processes, members)


def test_of_a_simulator_there_are_as_many_as_repetitions(monkeypatch):
    assert make_evaluator(*TINY).max_envs == MAX_ENVS
    assert make_evaluator(*TINY, "max_envs=7").max_envs == 7
    monkeypatch.setattr(WindEnv, "simulated", True)
    assert make_evaluator(*TINY).max_envs == 3
    assert make_evaluator(*TINY, "max_envs=7").max_envs == 7


# Another env for fitness than for validation


def record_plays(monkeypatch, *options):
    """Let evaluators record the environments and options that they evaluate."""
    played, play = [], Evaluator.play

    def record(self, vectors, task):
        values = tuple(task.env_config[option] for option in options)
        played.append((int(task.env_ids[0]) >= VALIDATION_ENVS, *values))
        return play(self, vectors, task)

    monkeypatch.setattr(Evaluator, "play", record)
    return played


def test_fitness_has_an_env_of_its_own_and_validation_has_not(tmp_path, monkeypatch):
    played = record_plays(monkeypatch, "width")
    envs, sizes = ("env.width=3", "fitness_env={width: 2}"), ("total_generations=3",)
    run = finished_run(tmp_path / "run", *envs, *sizes, "validation.every=5")
    assert sorted(played) == [(False, 2)] * 3 + [(True, 3)]
    assert run.config["env"]["width"] == 3


def test_what_fitness_is_measured_in_is_what_is_learned_from(tmp_path):
    """The same fitness as in a run whose only env it is, other validation."""
    plain = finished_run(tmp_path / "plain", "env.width=1")
    apart = finished_run(tmp_path / "apart", "env.width=3", "fitness_env={width: 1}")
    (rows, plain_state), (other_rows, apart_state) = results(plain), results(apart)
    kinds = ("fitness_mean", "fitness_max", "fitness_min", "step_size")
    for row, other_row in zip(rows, other_rows, strict=True):
        assert [row[kind] for kind in kinds] == [other_row[kind] for kind in kinds]
    assert rows[0]["validation_favourite"] != other_rows[0]["validation_favourite"]
    plain_state.pop("best"), apart_state.pop("best")  # chosen by validation
    assert plain_state == apart_state


@pytest.mark.parametrize(
    ("preset", "simulator", "option", "training", "measured"),
    [
        ("ant_attention_neuron", "pybullet", "alive_bonus", False, True),
        ("car_racing_attention_neuron", "Box2D", "no_reward_limit", 20, 0),
    ],
)
def test_published_presets_learn_from_another_reward_than_they_are_measured_by(
    tmp_path, monkeypatch, preset, simulator, option, training, measured
):
    pytest.importorskip(simulator)
    played = record_plays(monkeypatch, option)
    sizes = ("evolution.population=3", "repetitions=1", "total_generations=1")
    limits = ("env.max_steps=3", "validation.episodes=1", "threads=1")
    config = compose("evolve", [f"experiment={preset}", *sizes, *limits])
    run = Run.create(tmp_path / "run", config, "evolve")
    evolve(run, run.config)
    run.close()
    assert played == [(False, training), (True, measured)]
    # What `marl-pool evaluate` takes from the run.
    assert Run.open(run.path).config["env"][option] == measured


# Runs


@pytest.mark.parametrize("strategy", ["cma", "pgpe"])
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, strategy):
    choice = (f"evolution={strategy}", "fitness_env={max_steps: 7}")
    whole = finished_run(tmp_path / "whole", *choice)
    part = finished_run(tmp_path / "part", *choice, "total_generations=3")
    part = Run.open(part.path)
    assert part.verb == "evolve"
    evolve(part, {**part.config, "total_generations": 6})
    assert results(part) == results(whole)
    assert part.best == whole.best
    for folder in ("policy", BEST):
        policies = (load_policy(r.latest_checkpoint() / folder) for r in (part, whole))
        assert torch.equal(*map(to_vector, policies))


def test_one_seed_fixes_a_run_and_another_changes_it(tmp_path):
    first, repeat, reseeded = (
        results(finished_run(tmp_path / name, f"seed={seed}"))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == repeat
    assert first[0][0]["fitness_mean"] != reseeded[0][0]["fitness_mean"]


def test_the_best_by_validation_is_kept_and_the_favourite_is_the_last(tmp_path):
    run = finished_run(tmp_path / "run", "total_generations=9", "evolution.sigma0=1.0")
    policy = load_policy(run.policy_path())
    env = make_batched_env("helpers.wind_env:WindEnv", 4, first_env=VALIDATION_ENVS)
    score = Rollout(env, {"agent": policy}).episodes().returns["agent"].mean()
    assert float(score) == pytest.approx(run.best.score, rel=1e-4)
    scores = [
        row[name]
        for row in run.rows()
        for name in ("validation_favourite", "validation_best_sample")
    ]
    # Generation 1 is validated too, so that there is a policy from then on.
    assert [np.isfinite(score) for score in scores[::2]] == [
        generation == 1 or generation % 2 == 0 for generation in range(1, 10)
    ]
    assert run.best.score == np.nanmax(scores)
    with np.load(run.latest_checkpoint() / SEARCH) as arrays:
        favourite, best = arrays[".mean"], arrays[BEST]
    last = to_vector(load_policy(run.policy_path("last")))
    assert last.tolist() == favourite.astype(np.float32).tolist()
    assert to_vector(policy).tolist() == best.astype(np.float32).tolist()


def test_a_row_says_what_a_generation_found_and_cost(tmp_path):
    run = finished_run(tmp_path / "run")
    rows = run.rows()
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for number, row in enumerate(rows, 1):
        assert row["episodes"] == number * 18
        assert row["env_steps"] == number * 18 * 5
        assert row["fitness_min"] <= row["fitness_mean"] <= row["fitness_max"]
        assert row["rollouts_per_second"] == pytest.approx(
            18 * row["generations_per_second"]
        )
    assert rows[0]["seconds"] < rows[-1]["seconds"]


def test_a_best_that_was_marked_after_the_last_checkpoint_is_found_again(tmp_path):
    run = finished_run(tmp_path / "run", "evolution.sigma0=1.0", "checkpoint.every=9")
    assert run.best.iteration > 1
    expected = results(run), run.best
    for folder in run.checkpoints():  # as if killed just before the first of them
        shutil.rmtree(folder)
    evolve(run, run.config)
    assert (results(run), run.best) == expected


def test_a_run_goes_on_without_the_folder_that_it_started_from(tmp_path):
    first = finished_run(tmp_path / "first", "total_generations=1")
    options = (f"init={first.path}", "checkpoint.every=1")
    whole = finished_run(tmp_path / "whole", *options)
    part = finished_run(tmp_path / "part", *options, "total_generations=2")
    first.path.rename(tmp_path / "elsewhere")
    evolve(part, {**part.config, "total_generations": 6})
    assert results(part) == results(whole)


def test_the_time_limit_ends_a_run_that_resumes(tmp_path):
    run = finished_run(tmp_path / "run", "time_limit=1e-9")
    assert len(run.rows()) == 1
    assert run.latest_checkpoint().name == "iter_000001"


@pytest.mark.parametrize("strategy", ["pgpe", "cma"])
@pytest.mark.parametrize("checks", [1, 4, 8])
def test_a_generation_beyond_the_time_limit_is_given_up_and_repeated(
    tmp_path, monkeypatch, strategy, checks
):
    """The limit ends in the episodes of generation 3, or in its validation."""
    options = [f"evolution={strategy}", "validation.every=3", "checkpoint.every=1"]
    whole = finished_run(tmp_path / "whole", *options, "total_generations=5")

    num_checks = 0

    def is_late(loop) -> bool:
        nonlocal num_checks
        num_checks += loop.iteration == 2
        return num_checks >= checks

    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_is_late", is_late)
        seconds_left = lambda loop: -1.0 if num_checks >= checks else 1.0  # noqa: E731
        patch.setattr(TrainingLoop, "_seconds_left", seconds_left)
        limited = [*options, "total_generations=5", "time_limit=1000"]
        part = finished_run(tmp_path / "part", *limited)
    assert num_checks == checks
    assert part.iterations_saved == len(part.rows()) == 2
    evolve(part, {**part.config, "time_limit": None})
    assert results(part) == results(whole)


def test_a_return_that_is_not_finite_stops_the_run(tmp_path):
    run = tiny_run("env.fault=poison", "env.episode=4", path=tmp_path / "run")
    message = "generation 4: NaN or infinite: rewards of .*; kept"
    with pytest.raises(StoppedError, match=message):
        evolve(run, run.config)
    assert run.latest_checkpoint().name == "iter_000002"


def test_a_damaged_checkpoint_is_named(tmp_path):
    run = finished_run(tmp_path / "run", "total_generations=2")
    (run.latest_checkpoint() / SEARCH).write_bytes(b"no arrays")
    with pytest.raises(StoppedError, match="iter_000002 cannot be read: .*start anoth"):
        evolve(run, {**run.config, "total_generations": 3})


def test_ctrl_c_lets_the_generation_end(tmp_path, monkeypatch, capsys):
    play = Evaluator.play

    def interrupted(self, vectors, task):
        if task.episode == 3:
            signal.raise_signal(signal.SIGINT)
        return play(self, vectors, task)

    monkeypatch.setattr(Evaluator, "play", interrupted)
    path = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["evolve", *TINY, "--run-dir", str(path)]) == 130
    assert f"resume with: marl-pool resume {path}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before
    run = Run.open(path)
    assert len(run.rows()) == 3
    assert run.latest_checkpoint().name == "iter_000003"


# Where a search starts


def agent_for(name="feed_forward", **options):
    group = make_batched_env("cartpole", 1).groups["agent"]
    return make_agent(group.tokens, group.action_space, name, seed=1, **options)


def test_a_search_starts_where_it_is_told(tmp_path):
    agent, saved = agent_for(), agent_for()
    load_vector(saved, torch.arange(len(to_vector(agent))).float())
    save_policy(saved, tmp_path / "saved")
    assert torch.equal(start_vector("policy", agent, "agent", ()), to_vector(agent))
    assert not start_vector("zeros", agent, "agent", ()).any()
    start = start_vector(str(tmp_path / "saved"), agent, "agent", ())
    assert torch.equal(start, to_vector(saved))


def test_a_search_goes_on_from_the_policy_of_a_run(tmp_path):
    run = finished_run(tmp_path / "first", "total_generations=2")
    options = (f"init={run.path}", "total_generations=1")
    later = finished_run(tmp_path / "later", *options, "evolution.sigma0=1e-9")
    start, end = (to_vector(load_policy(item.policy_path())) for item in (run, later))
    torch.testing.assert_close(start, end, rtol=0, atol=1e-6)


def test_a_policy_that_does_not_fit_starts_no_search(tmp_path):
    saved, short = agent_for(), agent_for(hidden=[])
    longer = agent_for(hidden=[])
    longer.body.extend([torch.nn.Tanh(), torch.nn.Linear(1, 1)])
    sensory = agent_for("sensory", pooling={"name": "attention_neuron"})
    for source, agent, message in (
        (saved, agent_for(hidden=[4]), "another body.0.weight than the run's policy"),
        (saved, sensory, "expected a Sensory, .* is a FeedForward"),
        (short, longer, "has no body.2.weight"),
    ):
        folder = tmp_path / message[:9]
        save_policy(source, folder)
        with pytest.raises(InputError, match=message):
            start_vector(str(folder), agent, "agent", ())


# The command


@yaml_cases("overrides, message")
def test_bad_input_is_refused_in_one_line(elsewhere, refused, overrides, message):
    assert message in refused("evolve", "--run-dir", "run", *overrides)
    assert not list(elsewhere.iterdir())


PRESETS = {
    "cartpole_attention_neuron": (TokenSpec(5, 1, CHANNEL, has_self=False), 1, 913),
    "cartpole_feed_forward": (TokenSpec(5, 1, CHANNEL, has_self=False), 1, 113),
    "ant_attention_neuron": (TokenSpec(28, 1, CHANNEL, has_self=False), 8, 2504),
    "car_racing_attention_neuron": (PATCHES, 3, 7212),
}
"""Tokens that a preset shows its policy, and its numbers of actions and parameters."""


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_those_of_the_paper(preset):
    spec, num_actions, count = PRESETS[preset]
    config = compose("evolve", [f"experiment={preset}"])
    space = Box(-1, 1, (num_actions,))
    policy = make_agent(spec, space, **config["policy"], seed=0)
    assert len(to_vector(policy)) == count
    if preset.startswith("cartpole_attention"):
        assert config["policy"]["pooling"]["scale"] is False
    if not preset.startswith("cartpole"):
        # The published numbers stand beside a run's.
        assert CLEAN in published_for(policy, config["env"])


def test_a_preset_leaves_policy_and_strategy_to_choose():
    preset = "experiment=cartpole_attention_neuron"
    config = compose("evolve", [preset, "policy=feed_forward", "evolution=cma"])
    assert config["policy"] == {"name": "feed_forward", "hidden": [16]}
    assert config["evolution"] == compose("evolve", ["evolution=cma"])["evolution"]


def test_a_run_is_evolved_resumed_and_evaluated_by_command(tmp_path, capsys):
    path = str(tmp_path / "run")
    small = ("env.max_steps=5", "evolution.population=4", "repetitions=2", "threads=1")
    options = ("validation.episodes=2", "total_generations=2")
    assert cli.main(["evolve", *small, *options, "--run-dir", path]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [path, f"{path}/metrics.csv", f"{path}/policy"]
    assert "2 / 2 generations" in err
    assert "rollouts per second" in err
    text = Path(path, "config.yaml").read_text()
    assert yaml.safe_load(text)["verb"] == "evolve"
    assert cli.main(["resume", path]) == 0
    message = f"{path}: 2 of 2 generations are done; nothing to do\n"
    assert capsys.readouterr().out == message
    assert cli.main(["resume", path, "total_generations=3"]) == 0
    assert len(Run.open(path).rows()) == 3
    assert cli.main(["resume", path, "repetitions=3"]) == 2
    assert "takes only total_generations, time_limit" in capsys.readouterr().err
    assert cli.main(["evaluate", path, "suite=quick", "episodes=2", "threads=1"]) == 0
    assert Path(path, "evaluation", "results.json").is_file()


def test_a_run_names_itself_after_the_policy():
    name = default_path(compose("evolve", ["seed=4"])).name
    assert name.endswith("-cartpole-sensory-s4")


@pytest.mark.slow
def test_without_workers_ray_is_not_imported(tmp_path):
    source = f"""
import json, sys
from marl_pool.cli.main import main
assert main(["evolve", *{TINY!r}, "--run-dir", {str(tmp_path / "run")!r}]) == 0
print(json.dumps([m for m in ("ray", "torchvision") if m in sys.modules]))
"""
    command = [sys.executable, "-c", source]
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 300}
    result = subprocess.run(command, **options)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == []


# Workers


@pytest.fixture(scope="module")
def ray_here(no_cluster):
    """One ray for all tests of workers; a run keeps what runs already."""
    pytest.importorskip("ray")
    from marl_pool.training.cluster import quiet, ray_session

    with quiet(), ray_session(None, num_cpus=3):
        yield


@pytest.mark.slow
def test_workers_find_what_one_process_finds(tmp_path, ray_here):
    apart = finished_run(tmp_path / "apart", "resources.num_workers=2", "max_envs=2")
    alone = finished_run(tmp_path / "alone", "max_envs=2")
    assert results(apart) == results(alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "message"), [(0, "at most 3 CPUs, got 4"), (99, "at most 0 GPUs, got 99")]
)
def test_more_than_ray_has_is_refused(tmp_path, ray_here, gpus, message):
    workers = f"resources.num_workers={1 if gpus else 4}"
    share = f"resources.num_gpus_per_worker={gpus}"
    run = tiny_run(workers, share, path=tmp_path / "run")
    with pytest.raises(InputError, match=f"resources: expected {message}"):
        evolve(run, run.config)


@pytest.mark.slow
def test_a_worker_that_is_killed_is_started_again(tmp_path, ray_here):
    fault = ("env.fault=kill", f"env.diary={tmp_path}", "resources.num_workers=1")
    run = finished_run(tmp_path / "run", *fault, "max_envs=3")
    assert len(list(tmp_path.glob("killed-*"))) == 1
    assert results(run) == results(finished_run(tmp_path / "alone", "max_envs=3"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", "a worker failed: RuntimeError: a rock fell; traceback in"),
        ("kill", "a worker died, was restarted and died again; see"),
    ],
)
def test_a_worker_that_keeps_failing_stops_the_run(tmp_path, ray_here, fault, message):
    run = tiny_run(
        *(f"env.fault={fault}", "env.kills=9", f"env.diary={tmp_path}"),
        *("resources.num_workers=1", "checkpoint.every=1", "env.episode=3"),
        path=tmp_path / "run",
    )
    with pytest.raises(StoppedError, match=message):
        evolve(run, run.config)
    assert run.error_path.is_file()
    assert run.latest_checkpoint().name == "iter_000002"
