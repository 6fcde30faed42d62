"""Benchmarks of evolution and cloning, in batches and one agent at a time."""

import statistics
from collections.abc import Iterator
from operator import itemgetter

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import Adam, Optimizer
from torch.utils._pytree import tree_map_only

from benchmarks.common import Row, Size, compare, seconds
from marl_pool.config import compose
from marl_pool.envs import make_batched_env
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.agent import load_vector, to_vector
from marl_pool.policies.sensory import Sensory
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling
from marl_pool.rollout import Rollout
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.training.cloning.learner import Learner
from marl_pool.training.cloning.sampler import SequenceBatch
from marl_pool.training.cloning.settings import CloneSettings
from marl_pool.training.evolution.cma_es import CMAES
from marl_pool.training.evolution.evaluator import (
    Evaluator,
    PopulationReturns,
    PopulationTask,
)
from marl_pool.training.settings import EvolveConfig

ALONE = 24
"""Episodes that the comparator plays; its time is scaled by the steps of all."""


def generation(size: Size) -> Iterator[Row]:
    """Measure generation 1 of CMA-ES: 256 vectors, 16 CartPole episodes each.

    Compare with our agents one at a time, and with what one would write with pycma,
    Gymnasium's vector environment and torch, one member at a time or all by `vmap`.
    """
    from benchmarks.peers import member_by_member, population_mapped  # needs cma

    torch.set_num_threads(1)
    population, repetitions = (4, 2) if size.tiny else (256, 16)
    overrides = ["experiment=cartpole_attention_neuron", f"device={size.device}"]
    config = compose("evolve", [*overrides, f"repetitions={repetitions}"])
    evaluator = Evaluator(EvolveConfig.from_plain(config))
    start = torch.zeros_like(to_vector(evaluator.agent))
    layer = evaluator.agent.sensor
    assert isinstance(layer, AttentionNeuronPooling)
    member = member_by_member(layer, repetitions)
    mapped = population_mapped(layer, population, repetitions, 2 if size.tiny else 20)
    whole, ratios = [], []
    peers: dict[str, list[float]] = {"pycma": [], "vmap": [], "vmap/longest": []}
    for turn in range(1 + size.rounds):
        strategy = CMAES(start, population=population, seed=turn)
        task = PopulationTask(torch.arange(repetitions), turn + 1, config["env"])
        done: list[tuple[Tensor, PopulationReturns]] = []

        def run(strategy: CMAES = strategy, task: PopulationTask = task) -> None:
            vectors = strategy.ask(1)
            played = evaluator.play(vectors, task)
            strategy.tell(vectors, played.returns.mean(1))
            done.append((vectors, played))  # noqa: B023

        whole.append(seconds(run))
        vectors, played = done[0]
        batched = seconds(lambda: evaluator.play(vectors, task))  # noqa: B023
        total = int(played.lengths.sum())
        ratios.append(_a_step_alone(evaluator, vectors, task) * total / batched)
        peers["pycma"].append(member() * total)
        step = mapped()
        peers["vmap"].append(step / played.lengths.numel() * total)
        peers["vmap/longest"].append(step * int(played.lengths.max()))
    ours, ratio = statistics.median(whole[1:]), statistics.median(ratios[1:])
    yield Row(
        "generation/cartpole",
        ours,
        "s",
        f"the same agents one at a time, a step of {ALONE} episodes times all steps",
        ratio,
        f"one core, with CMA-ES; {population * repetitions / ours:,.0f} rollouts/s; "
        "published code: 23.6 s, measured elsewhere",
    )
    descriptions = {
        "pycma": "pycma's vectors one at a time in a SyncVectorEnv",
        "vmap": "torch.func.vmap over the population in a SyncVectorEnv that resets",
        "vmap/longest": "the same until the longest episode has ended",
    }
    for name, times in peers.items():
        comparator = f"{descriptions[name]}, times all steps"
        yield compare(f"generation/cartpole/{name}", whole[1:], times[1:], comparator)


def _a_step_alone(evaluator: Evaluator, vectors: Tensor, task: PopulationTask) -> float:
    """Return the seconds per step of agents that play one after the other."""
    agent, steps, spent = evaluator.agent, 0, 0.0
    for number in range(min(ALONE, len(vectors))):
        load_vector(agent, vectors[number].to(agent.low))
        env = make_batched_env(num_envs=1, device=evaluator.device, **task.env_config)
        env.renumber(task.env_ids[:1], task.episode)
        rollout = Rollout(env, {evaluator.group: agent})
        lengths: list[Tensor] = []
        spent += seconds(lambda: lengths.append(rollout.episodes().lengths))  # noqa: B023
        steps += int(lengths[0].sum())
    return spent / steps


class PlainStudent(nn.Module):
    """The same student as a loop over an LSTM cell, with autograd.

    Args:
        student: the student whose sizes to copy.
    """

    def __init__(self, student: Sensory) -> None:
        super().__init__()
        layer = student.sensor
        assert isinstance(layer, AttentionNeuronPooling)
        assert layer.cell is not None
        self.cell = nn.LSTMCell(layer.cell.input_size, layer.cell.hidden_size)
        self.key = nn.Linear(layer.key.in_features, layer.key.out_features)
        self.query = nn.Linear(layer.query.in_features, layer.query.out_features)
        self.register_buffer("table", layer.table)
        self.scale = layer.key.out_features**-0.5
        self.layers = nn.Sequential(
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 32),
            nn.Tanh(),
            nn.Linear(32, 8),
        )

    def forward(self, features: Tensor, prev_action: Tensor) -> Tensor:
        """Map one trajectory, ``(T, N, 1)`` and ``(T, A)``, to ``(T, A)``."""
        memory: tuple[Tensor, Tensor] | None = None
        outputs = []
        for readings, action in zip(features, prev_action, strict=True):
            inputs = torch.cat([readings, action.expand(len(readings), -1)], dim=-1)
            memory = self.cell(inputs, memory)
            scores = self.query(self.table) @ self.key(memory[0]).T * self.scale
            outputs.append(self.layers(torch.tanh(torch.tanh(scores) @ readings)[:, 0]))
        return torch.stack(outputs)


def _learn_plainly(
    plain: PlainStudent, optimizer: Optimizer, rows: list[SequenceBatch]
) -> None:
    """Take a gradient step on each trajectory."""
    for row in rows:
        optimizer.zero_grad(set_to_none=True)
        outputs = plain(row.tokens.features[0], row.prev_action[0])
        mse_loss(outputs, row.label[0]).backward()
        clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()


def cloning(size: Size) -> Iterator[Row]:
    """Measure a gradient step on eight whole trajectories of an Ant-sized student."""
    torch.set_num_threads(1)
    count, steps = (2, 5) if size.tiny else (8, 500)
    spec = TokenSpec(28, 1, ("channel",), has_self=False)
    actions = ActionSpec(low=(-1.0,) * 8, high=(1.0,) * 8)
    student = Sensory(
        spec,
        actions,
        pooling={"name": "attention_neuron", "num_codes": 32},
        hidden=[32, 32],
        seed=0,
    ).to(size.device)
    generator = torch.Generator().manual_seed(0)
    shape = (count, steps, 28)
    batch = SequenceBatch(
        tokens=Tokens(
            torch.randn(*shape, 1, generator=generator),
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape, dtype=torch.bool),
        ),
        prev_action=torch.rand(count, steps, 8, generator=generator) * 2 - 1,
        label=torch.rand(count, steps, 8, generator=generator) * 2 - 1,
        logits=None,
        valid=torch.ones(count, steps, dtype=torch.bool),
    ).to(size.device)
    rows = [
        tree_map_only(Tensor, itemgetter(slice(i, i + 1)), batch) for i in range(count)
    ]
    learner = Learner(student, CloneSettings(grad_clip=0.1))
    plain = PlainStudent(student).to(size.device)
    optimizer = Adam(plain.parameters(), lr=3e-4)
    together, alone, plainly = [], [], []
    for _ in range(1 + size.rounds):
        together.append(seconds(lambda: learner.learn(batch, 3e-4)))
        alone.append(seconds(lambda: [learner.learn(row, 3e-4) for row in rows]))
        plainly.append(seconds(lambda: _learn_plainly(plain, optimizer, rows)))
    pairs = zip(plainly[1:], together[1:], strict=True)
    yield Row(
        "clone/ant",
        statistics.median(together[1:]),
        "s",
        "one trajectory after the other, by torch's LSTMCell and autograd: "
        f"{statistics.median(plainly[1:]):.3g} s",
        statistics.median(a / b for a, b in pairs),
        f"{count} trajectories of {steps} steps, all steps back; one core; ours one "
        f"after the other: {statistics.median(alone[1:]):.3g} s",
    )
