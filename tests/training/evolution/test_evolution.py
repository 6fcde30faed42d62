"""Evolution: strategies, populations in the same environments, exact resume."""

import json
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from gymnasium.spaces import Box
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch.utils._pytree import tree_leaves, tree_map

from helpers.paths import ROOT
from helpers.tables import yaml_cases
from helpers.training import run_python
from helpers.wind_env import WINDY, WindEnv
from marl_pool import InputError
from marl_pool.cli import main as cli
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.evaluation.results import CLEAN
from marl_pool.files.reading import read_npz
from marl_pool.policies import make_agent
from marl_pool.policies.agent import Population, load_vector, to_vector
from marl_pool.policies.storage import load_policy, save_policy
from marl_pool.rollout import Rollout
from marl_pool.runs.run import Run
from marl_pool.tokens import TokenSpec
from marl_pool.training.evolution.evaluator import MAX_ENVS, Evaluator, PopulationTask
from marl_pool.training.evolution.evolve import BEST, SEARCH, evolve, start_vector
from marl_pool.training.evolution.pgpe import PGPE, centered_ranks
from marl_pool.training.jobs import config_of
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
SET_AGENT = "helpers.set_agent:SetAgent"
CHANNEL = ("channel",)
PATCHES = TokenSpec(256, 144, ("patch",), has_self=False, dtype="uint8")
ROUNDING = {"rtol": 1e-3, "atol": 1e-3}
"""Sums in another order, over some steps of an unstable system."""
TIMES = ("seconds", "generations_per_second", "rollouts_per_second")


def fitness(vectors):
    return -(vectors - 1).square().sum(1)


def search(strategy, first, last):
    """Run a strategy for some generations; return its samples."""
    drawn = []
    for generation in range(first, last + 1):
        vectors = strategy.ask(generation)
        drawn.append(vectors.clone())
        strategy.tell(vectors, fitness(vectors))
    return drawn


def tiny_run(path, *overrides, base=WINDY):
    """A run of a tiny configuration, not yet started."""
    return Run.create(path, compose("evolve", [*base, *overrides]), "evolve")


def finished_run(path, *overrides, base=WINDY):
    run = tiny_run(path, *overrides, base=base)
    evolve(run, config_of(run))
    run.close()
    return run


def results(run):
    """Return the rows without times, and all arrays of the newest checkpoint."""
    rows = [
        {name: repr(value) for name, value in row.items() if name not in TIMES}
        for row in run.rows()
    ]
    with np.load(run.latest_checkpoint() / SEARCH) as arrays:
        return rows, {name: array.tolist() for name, array in arrays.items()}


# Strategies


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *((name, 5) for name in STRATEGIES),
        ("pgpe", 310),
        pytest.param("cma", 310, marks=pytest.mark.slow),
    ],
)
def test_a_strategy_climbs(name, size):
    strategy = STRATEGIES[name](torch.zeros(size))
    before = float(fitness(strategy.center[None]))
    search(strategy, 1, 60)
    share = 0.1 if size == 5 else 0.95
    assert float(fitness(strategy.center[None])) > share * before
    assert strategy.center.shape == (size,)
    assert strategy.step_size > 0


@pytest.mark.parametrize(("size", "population"), [(5, 16), (225, 6)])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_saved_strategy_resumes_exactly(tmp_path, name, size, population):
    """From about 200 parameters on, BLAS rounding depends on the memory layout."""
    start, options = torch.zeros(size), {"population": population, "seed": 3}
    saved, restored = (STRATEGIES[name](start, **options) for _ in range(2))
    search(saved, 1, 12)
    file = tmp_path / SEARCH
    np.savez(file, allow_pickle=False, **saved.state_dict())
    restored.load_state_dict(read_npz(file))
    assert torch.equal(restored.center, saved.center)
    assert restored.step_size == saved.step_size
    pairs = zip(search(saved, 13, 40), search(restored, 13, 40), strict=True)
    assert all(torch.equal(expected, actual) for expected, actual in pairs)
    assert torch.equal(restored.center, saved.center)


@pytest.mark.parametrize("diagonal", [False, True])
@pytest.mark.parametrize("population", [3, 4])
def test_a_tiny_population_resumes_exactly(population, diagonal):
    """Tiny populations mirror their worst vectors, and remember which were mirrored."""
    options = {"population": population, "diagonal": diagonal, "sigma0": 0.5}
    for until in range(1, 9):
        saved, restored = (CMAES(torch.zeros(10), **options) for _ in range(2))
        search(saved, 1, until)
        restored.load_state_dict(saved.state_dict())
        ends = [search(strategy, until + 1, 12) for strategy in (saved, restored)]
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
    full, quarter = (CMAES(start, population=8, mean_lr=rate) for rate in (1.0, 0.25))
    for strategy in (full, quarter):
        search(strategy, 1, 1)
    moved = full.center - start
    assert moved.abs().max() > 0.01
    torch.testing.assert_close(quarter.center - start, 0.25 * moved)


def test_cma_draws_each_number_of_a_generation_once(monkeypatch):
    """Two-point step-size adaptation draws more numbers than the population needs."""
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


def test_pgpe_decays_its_learning_rate_and_step_size():
    rates = {"lr": 0.1, "lr_decay": 1.0, "std": 0.4, "std_decay": 1.0}
    strategy = PGPE(torch.zeros(3), population=4, **rates)
    places = [strategy.center]
    for generation in range(1, 4):
        search(strategy, generation, generation)
        assert strategy.step_size == pytest.approx(0.4 / (1 + generation))
        places.append(strategy.center)
    first = (places[1] - places[0]).abs()
    torch.testing.assert_close(first, torch.full_like(first, 0.1))  # as Adam begins
    # No step of Adam is longer than lr · (1 - b1) / sqrt(1 - b2).
    last = (places[3] - places[2]).abs().max()
    assert last <= 0.1 / 3 * (1 - 0.9) / (1 - 0.999) ** 0.5


def test_pgpe_keeps_its_floor_and_changes_by_a_fifth_at_most():
    unstable = PGPE(torch.zeros(3), population=4, std=1.0, std_lr=1e6)
    search(unstable, 1, 1)
    assert set(unstable.std.tolist()) <= {0.8, 1.2, 1.0}
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
    expected = (stats.rankdata(values) - 1) / (len(values) - 1) - 0.5
    assert ranks.tolist() == pytest.approx(expected.tolist())


def test_ranks_of_a_large_population_take_little_memory():
    fitness = torch.arange(1 << 20).double()
    assert centered_ranks(fitness)[-1] == 0.5


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
    copies = vectors.repeat(4, 1)
    first, second = (
        evaluator.play(copies, PopulationTask(torch.arange(6), episode, env)).returns
        for episode in (1, 2)
    )
    torch.testing.assert_close(first, first[:1].expand(4, -1), **ROUNDING)
    assert len(set(first[0].tolist())) == 6
    assert (first - second).abs().min() > 0.01


@pytest.mark.parametrize("policy", ["sensory", "feed_forward", SET_AGENT])
def test_a_population_plays_as_its_members_do_one_by_one(policy):
    evaluator, vectors = cartpole_agents(f"policy={policy}")
    task = PopulationTask(torch.arange(6), 3, {"name": "cartpole", "max_steps": 20})
    batched = evaluator.play(vectors, task)
    evaluator.max_envs = 6
    separate = evaluator.play(vectors, task)
    torch.testing.assert_close(batched.returns, separate.returns, **ROUNDING)
    assert torch.equal(batched.lengths, separate.lengths)
    assert len(set(separate.returns.sum(1).tolist())) == 5
    numbers = {"first_episode": 3, "seed": 0, "first_env": 0}
    env = make_batched_env("cartpole", 6, max_steps=20, **numbers)
    load_vector(evaluator.agent, vectors[2])
    episodes = Rollout(env, {"agent": evaluator.agent}).episodes()
    assert torch.equal(separate.returns[2], episodes.returns["agent"][:, 0])
    assert torch.equal(separate.lengths[2], episodes.lengths)


def test_a_custom_agent_with_attention_is_evolved(tmp_path):
    base = [option for option in WINDY if not option.startswith("policy")]
    run = finished_run(tmp_path, f"policy={SET_AGENT}", base=base)
    assert len(run.rows()) == 6


def test_a_perturbation_is_the_same_for_all_members():
    evaluator, vectors = cartpole_agents("perturbation=shuffle", count=1)
    task = PopulationTask(torch.arange(6), 1, {"name": "cartpole", "max_steps": 40})
    returns = evaluator.play(vectors.repeat(3, 1), task).returns
    torch.testing.assert_close(returns, returns[:1].expand(3, -1), **ROUNDING)
    plain, _ = cartpole_agents("policy=feed_forward")
    shuffled, w = cartpole_agents("policy=feed_forward", "perturbation=shuffle")
    assert not torch.equal(plain.play(w, task).returns, shuffled.play(w, task).returns)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30), st.integers(1, 4))
def test_chunks_cover_all_and_fit(members, episodes, limit, processes):
    evaluator = Evaluator.__new__(Evaluator)
    evaluator.max_envs = limit
    covered = torch.zeros(members, episodes)
    chunks = list(evaluator.chunks(members, episodes, processes))
    for piece in chunks:
        covered[piece] += 1
        assert 0 < covered[piece].numel() <= limit
    assert (covered == 1).all()
    assert len(chunks) >= min(processes, members)
    # No process waits long for the last part.
    sizes = [piece.members.stop - piece.members.start for piece in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_agents_that_are_born_keep_their_member():
    agent = agent_for("sensory", pooling={"name": "attention_neuron"})
    population = Population(agent, to_vector(agent).repeat(2, 1))
    state = population.initial_state(4, 1, 5)
    rows = torch.tensor([1, 2, 3])
    remaining = tree_map(lambda part: part[rows] + 1, state["agent"])
    state = {"member": state["member"][rows], "agent": remaining}
    newborn = population.newborn_state(state, 3, 1, 5)
    assert newborn["member"].equal(state["member"])
    assert not any(part.any() for part in tree_leaves(newborn["agent"]))


def test_the_best_policy_is_restored_from_the_checkpoint(tmp_path, capsys):
    run = finished_run(tmp_path / "run", "total_generations=4", "checkpoint.every=1")
    record, best = run.policy_dir / "best.json", run.best
    weights = {path.name: path.read_bytes() for path in run.policy_dir.iterdir()}
    for damage in (lambda: record.write_text("{"), record.unlink):
        damage()
        resumed = Run.open(run.path)
        resumed.config["total_generations"] += 0
        evolve(resumed, config_of(resumed))
        resumed.close()
        assert f"restored from generation {best.iteration}" in capsys.readouterr().err
        assert Run.open(run.path).best == best
        for name, content in weights.items():
            assert (run.policy_dir / name).read_bytes() == content


def test_a_simulator_has_one_env_per_repetition_by_default(monkeypatch):
    assert make_evaluator(*WINDY).max_envs == MAX_ENVS
    assert make_evaluator(*WINDY, "max_envs=7").max_envs == 7
    monkeypatch.setattr(WindEnv, "simulated", True)
    assert make_evaluator(*WINDY).max_envs == 3
    assert make_evaluator(*WINDY, "max_envs=7").max_envs == 7


# Another env for fitness than for validation


def record_plays(monkeypatch, *options):
    """Record the environments and options of evaluators."""
    played, play = [], Evaluator.play

    def record(self, vectors, task):
        values = tuple(task.env_config[option] for option in options)
        played.append((int(task.env_ids[0]) >= VALIDATION_ENVS, *values))
        return play(self, vectors, task)

    monkeypatch.setattr(Evaluator, "play", record)
    return played


def test_fitness_and_validation_may_have_different_envs(tmp_path, monkeypatch):
    played = record_plays(monkeypatch, "width")
    envs, sizes = ("env.width=3", "fitness_env={width: 2}"), ("total_generations=3",)
    run = finished_run(tmp_path / "run", *envs, *sizes, "validation.every=5")
    assert sorted(played) == [(False, 2)] * 3 + [(True, 3)] * 2
    assert run.config["env"]["width"] == 3


def test_evolution_learns_from_the_fitness_env(tmp_path):
    """Fitness is as in a run with only this env; validation differs."""
    plain = finished_run(tmp_path / "plain", "env.width=1")
    split = finished_run(tmp_path / "apart", "env.width=3", "fitness_env={width: 1}")
    (rows, plain_state), (other_rows, split_state) = results(plain), results(split)
    kinds = ("fitness_mean", "fitness_max", "fitness_min", "step_size")
    for row, other_row in zip(rows, other_rows, strict=True):
        assert [row[kind] for kind in kinds] == [other_row[kind] for kind in kinds]
    assert rows[0]["validation_center"] != other_rows[0]["validation_center"]
    plain_state.pop("best"), split_state.pop("best")  # chosen by validation
    assert plain_state == split_state


@pytest.mark.parametrize(
    ("preset", "option", "training", "measured"),
    [
        ("ant_attention_neuron", "alive_bonus", False, True),
        ("car_racing_attention_neuron", "no_reward_limit", 20, 0),
    ],
)
def test_published_presets_have_another_reward_for_fitness(
    tmp_path, monkeypatch, preset, option, training, measured
):
    pytest.importorskip("pybullet" if preset.startswith("ant") else "Box2D")
    played = record_plays(monkeypatch, option)
    sizes = ("evolution.population=3", "repetitions=1", "total_generations=1")
    limits = ("env.max_steps=3", "validation.episodes=1", "threads=1")
    base = (f"experiment={preset}", *sizes, *limits)
    run = finished_run(tmp_path / "run", base=base)
    assert played == [(False, training), (True, measured)]
    # What `marl-pool evaluate` reads from the run.
    assert Run.open(run.path).config["env"][option] == measured


# Runs


@pytest.mark.parametrize("strategy", ["cma", "pgpe"])
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, strategy):
    choice = (f"evolution={strategy}", "fitness_env={max_steps: 7}")
    reference = finished_run(tmp_path / "whole", *choice)
    stopped = tiny_run(tmp_path / "part", *choice)
    evolve(stopped, config_of(stopped), lambda: len(stopped.rows()) == 3)
    resumed = Run.open(stopped.path)
    assert (resumed.verb, len(resumed.rows())) == ("evolve", 3)
    evolve(resumed, config_of(resumed))
    assert results(resumed) == results(reference)
    assert resumed.best == reference.best
    for folder in ("policy", BEST):
        policies = (
            load_policy(r.latest_checkpoint() / folder) for r in (resumed, reference)
        )
        assert torch.equal(*map(to_vector, policies))


def test_another_seed_changes_a_run(tmp_path):
    first, reseeded = (
        finished_run(tmp_path / seed, seed, "total_generations=1").rows()[0]
        for seed in ("seed=1", "seed=2")
    )
    assert first["fitness_mean"] != reseeded["fitness_mean"]


def test_the_best_by_validation_is_kept_and_the_center_is_the_last(tmp_path):
    options = ("total_generations=9", "validation.every=4", "evolution.sigma0=1.0")
    run = finished_run(tmp_path / "run", *options)
    policy = load_policy(run.policy_path())
    env = make_batched_env("helpers.wind_env:WindEnv", 4, first_env=VALIDATION_ENVS)
    score = Rollout(env, {"agent": policy}).episodes().returns["agent"].mean()
    assert float(score) == pytest.approx(run.best.score, rel=1e-4)
    scores = [
        row[name]
        for row in run.rows()
        for name in ("validation_center", "validation_best_sample")
    ]
    # So are the first, after which there is a policy, and the last.
    assert [np.isfinite(score) for score in scores[::2]] == [
        generation in (1, 4, 8, 9) for generation in range(1, 10)
    ]
    assert run.best.score == np.nanmax(scores)
    with np.load(run.latest_checkpoint() / SEARCH) as arrays:
        center, best = arrays[".mean"], arrays[BEST]
    last = to_vector(load_policy(run.policy_path("last")))
    assert last.tolist() == center.astype(np.float32).tolist()
    assert to_vector(policy).tolist() == best.astype(np.float32).tolist()


def test_rows_hold_the_fitness_and_cost_of_each_generation(tmp_path):
    run = finished_run(tmp_path / "run")
    rows = run.rows()
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for number, row in enumerate(rows, 1):
        assert row["episodes"] == number * 18
        assert row["env_steps"] == number * 18 * 5
        assert row["fitness_min"] <= row["fitness_mean"] <= row["fitness_max"]
        rollouts = 18 * row["generations_per_second"]
        assert row["rollouts_per_second"] == pytest.approx(rollouts)
    assert rows[0]["seconds"] < rows[-1]["seconds"]


def test_an_address_that_no_worker_needs_is_reported(tmp_path, capsys):
    finished_run(tmp_path / "run", "total_generations=1", "resources.address=no:77")
    assert "resources.address: not used, as the run has no" in capsys.readouterr().err


def test_a_best_marked_after_the_last_checkpoint_is_found_again(tmp_path):
    run = finished_run(tmp_path / "run", "evolution.sigma0=1.0", "checkpoint.every=9")
    assert run.best.iteration > 1
    expected = results(run), run.best
    for folder in run.checkpoints():  # as if killed just before the first of them
        shutil.rmtree(folder)
    evolve(run, config_of(run))
    assert (results(run), run.best) == expected


def test_a_run_resumes_without_its_initial_folder(tmp_path):
    first = finished_run(tmp_path / "first", "total_generations=1")
    options = (f"init={first.path}", "checkpoint.every=1")
    reference = finished_run(tmp_path / "whole", *options)
    resumed = finished_run(tmp_path / "part", *options, "total_generations=2")
    first.path.rename(tmp_path / "elsewhere")
    evolve(resumed, replace(config_of(resumed), total_generations=6))
    assert results(resumed) == results(reference)


def test_the_initial_folder_is_found_from_any_directory(tmp_path, monkeypatch):
    first = finished_run(tmp_path / "first", "total_generations=1")
    monkeypatch.chdir(tmp_path)
    options = ("init=first", "checkpoint.every=9", "total_generations=9")
    stopped = tiny_run(tmp_path / "part", *options, base=WINDY)
    evolve(stopped, config_of(stopped), should_stop=lambda: True)
    assert stopped.config["init"] == str(first.path)


def test_the_time_limit_ends_a_run_that_resumes(tmp_path):
    run = finished_run(tmp_path / "run", "time_limit=1e-9")
    assert len(run.rows()) == 1
    assert run.latest_checkpoint().name == "iter_000001"


@pytest.mark.parametrize("strategy", ["pgpe", "cma"])
def test_a_generation_cut_by_the_time_limit_is_redone(tmp_path, monkeypatch, strategy):
    """The limit ends in the episodes of generation 3, or in its validation."""
    options = [f"evolution={strategy}", "validation.every=3", "checkpoint.every=9"]
    options.append("total_generations=5")
    reference = finished_run(tmp_path / "whole", *options)
    num_checks = limit = 0

    def is_late(loop) -> bool:
        nonlocal num_checks
        num_checks += loop.iteration == 2
        return num_checks >= limit

    def seconds_left(loop) -> float:
        return -1.0 if num_checks >= limit else 1.0

    for limit in (4, 8):
        num_checks = 0
        with monkeypatch.context() as patch:
            patch.setattr(TrainingLoop, "_is_late", is_late)
            patch.setattr(TrainingLoop, "_seconds_left", seconds_left)
            cut = finished_run(tmp_path / f"{limit}", *options, "time_limit=1000")
        assert num_checks == limit
        assert cut.last_saved_iteration == len(cut.rows()) == 2
        evolve(cut, replace(config_of(cut), time_limit=None))
        assert results(cut) == results(reference)


def test_a_return_that_is_not_finite_stops_the_run(tmp_path):
    run = tiny_run(tmp_path / "run", "env.fault=poison", "env.episode=4")
    message = "generation 4: NaN or infinite: rewards of .*; kept"
    with pytest.raises(StoppedError, match=message):
        evolve(run, config_of(run))
    assert run.latest_checkpoint().name == "iter_000002"


def test_ctrl_c_lets_the_generation_end(tmp_path, monkeypatch, capsys):
    play = Evaluator.play

    def interrupted(self, vectors, task):
        if task.episode == 3:
            signal.raise_signal(signal.SIGINT)
        return play(self, vectors, task)

    monkeypatch.setattr(Evaluator, "play", interrupted)
    path = tmp_path / "run"
    before = signal.getsignal(signal.SIGINT)
    assert cli.main(["evolve", *WINDY, "--run-dir", str(path)]) == 130
    assert f"resume with: marl-pool resume {path}" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) == before
    run = Run.open(path)
    assert len(run.rows()) == 3
    assert run.latest_checkpoint().name == "iter_000003"


# Initial parameters


def agent_for(name="feed_forward", **options):
    group = make_batched_env("cartpole", 1).groups["agent"]
    return make_agent(group.tokens, group.action_space, name, seed=1, **options)


def test_a_search_starts_from_the_configured_parameters(tmp_path):
    agent, saved = agent_for(), agent_for()
    load_vector(saved, torch.arange(len(to_vector(agent))).float())
    save_policy(saved, tmp_path / "saved")
    assert torch.equal(start_vector("policy", agent, "agent", ()), to_vector(agent))
    assert not start_vector("zeros", agent, "agent", ()).any()
    start = start_vector(str(tmp_path / "saved"), agent, "agent", ())
    assert torch.equal(start, to_vector(saved))
    run = finished_run(tmp_path / "run", "total_generations=2")
    best = load_policy(run.policy_path())
    start = start_vector(str(run.path), best, "agent", ())
    assert torch.equal(start, to_vector(best))


def test_a_policy_that_does_not_fit_starts_no_search(tmp_path):
    saved, short = agent_for(), agent_for(hidden=[])
    longer = agent_for(hidden=[])
    longer.body.extend([torch.nn.Tanh(), torch.nn.Linear(1, 1)])
    sensory = agent_for("sensory", pooling={"name": "attention_neuron"})
    wide = agent_for(hidden=[4])
    linear = agent_for("sensory", pooling={"name": "attention_neuron", "squash": False})
    for source, agent, message in (
        (saved, wide, r"has other options: expected policy.hidden = \[4\], got \[16\]"),
        (saved, sensory, "expected a Sensory, .* is a FeedForward"),
        (sensory, linear, "computes other outputs with the same weights"),
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
        # The published numbers are shown beside the run's.
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


@pytest.mark.slow
def test_without_workers_ray_is_not_imported(tmp_path):
    source = f"""
import json, sys
from marl_pool.cli.main import main
assert main(["evolve", *{WINDY!r}, "--run-dir", {str(tmp_path / "run")!r}]) == 0
print(json.dumps([m for m in ("ray", "torchvision") if m in sys.modules]))
"""
    result = run_python("-c", source, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == []


# Workers


@pytest.fixture(scope="module")
def ray_here(no_cluster):
    """One ray for all tests of workers; runs join a ray that is already running."""
    pytest.importorskip("ray")
    from marl_pool.training.cluster import quiet, ray_session

    with quiet(), ray_session(None, num_cpus=3):
        yield


@pytest.mark.slow
def test_workers_find_what_one_process_finds_though_one_is_killed(tmp_path, ray_here):
    fault = ("env.fault=kill", f"env.diary={tmp_path}", "resources.num_workers=2")
    distributed = finished_run(tmp_path / "apart", *fault, "max_envs=2")
    assert len(list(tmp_path.glob("killed-*"))) == 1
    local = finished_run(tmp_path / "alone", "max_envs=2")
    assert results(distributed) == results(local)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "message"), [(0, "at most 3 CPUs, got 4"), (99, "at most 0 GPUs, got 99")]
)
def test_more_than_ray_has_is_refused(tmp_path, ray_here, gpus, message):
    workers = f"resources.num_workers={1 if gpus else 4}"
    share = f"resources.num_gpus_per_worker={gpus}"
    run = tiny_run(tmp_path / "run", workers, share)
    with pytest.raises(InputError, match=f"resources: expected {message}"):
        evolve(run, config_of(run))


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
        *(tmp_path / "run", f"env.fault={fault}", "env.kills=9", "env.episode=3"),
        *(f"env.diary={tmp_path}", "resources.num_workers=1", "checkpoint.every=1"),
    )
    with pytest.raises(StoppedError, match=message):
        evolve(run, config_of(run))
    assert run.error_path.is_file()
    assert run.latest_checkpoint().name == "iter_000002"
