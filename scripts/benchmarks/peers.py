"""CartPole evolved as one would with pycma, Gymnasium and torch, for comparison."""

import math
import time
from collections.abc import Callable
from typing import Any

import cma
import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv, VectorEnv
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.functional import linear
from torch.nn.utils import vector_to_parameters

from marl_pool.envs.cartpole.env import (
    DT,
    FRICTION,
    GRAVITY,
    LEVER,
    MAX_FORCE,
    POLE_LENGTH,
    POLE_MASS,
    TOTAL_MASS,
    TRACK,
)
from marl_pool.pooling.attention_neuron import AttentionNeuronPooling

Memory = tuple[Tensor, Tensor]


class SwingUp(gymnasium.Env[np.ndarray, np.ndarray]):
    """The task of `marl_pool.envs.cartpole`, one episode in plain Python."""

    observation_space = spaces.Box(-np.inf, np.inf, (5,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin near to hanging."""
        super().reset(seed=seed)
        scale = np.array([TRACK, 10, math.pi / 2, 10])
        start = self.np_random.uniform(-1, 1, 4) * scale + [0, 0, math.pi, 0]
        self.x, self.speed, self.angle, self.turn = start.tolist()
        self.steps = 0
        return self._observe(), {}

    def step(
        self, action: np.ndarray
    ) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Advance by 0.01 s."""
        force = MAX_FORCE * max(-1.0, min(1.0, float(action[0])))
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        pull = 3 * POLE_MASS * GRAVITY * cos
        pull -= 2 * POLE_MASS * POLE_LENGTH * self.turn**2
        push = 4 * (force - FRICTION * self.speed) + sin * pull
        acceleration = push / (4 * TOTAL_MASS - 3 * POLE_MASS * cos * cos)
        self.x += DT * self.speed
        self.angle += DT * self.turn
        self.turn += DT * LEVER * (GRAVITY * sin + cos * acceleration)
        self.speed += DT * acceleration
        self.steps += 1
        reward = (math.cos(self.angle) + 1) / 2 * math.cos(math.pi * self.x / 2 / TRACK)
        return self._observe(), reward, abs(self.x) > TRACK, self.steps >= 1000, {}

    def _observe(self) -> np.ndarray:
        cos, sin = math.cos(self.angle), math.sin(self.angle)
        return np.array([self.x, self.speed, cos, sin, self.turn], np.float32)


class Neurons(nn.Module):
    """The published agent, by torch's modules.

    Args:
        layer: the layer whose sizes to copy.
    """

    table: Tensor

    def __init__(self, layer: AttentionNeuronPooling) -> None:
        super().__init__()
        assert layer.cell is not None
        self.cell = nn.LSTMCell(layer.cell.input_size, layer.cell.hidden_size)
        self.query, self.key = (
            nn.Linear(part.in_features, part.out_features, bias=False)
            for part in (layer.query, layer.key)
        )
        self.body = nn.Linear(len(layer.table), 1)
        self.register_buffer("table", layer.table)

    def forward(
        self, observations: Tensor, action: Tensor, memory: Memory
    ) -> tuple[Tensor, Memory]:
        """Return the actions ``(E, 1)`` for observations ``(E, 5)``, and the memory."""
        inputs = torch.stack([observations, action.expand_as(observations)], -1)
        memory = self.remember(inputs.flatten(0, 1), memory)
        keys = self.key(memory[0]).unflatten(0, observations.shape)
        scores = torch.tanh(self.query(self.table) @ keys.mT)
        codes = (scores @ observations[..., None])[..., 0]
        return torch.tanh(self.body(codes)), memory

    def remember(self, inputs: Tensor, memory: Memory) -> Memory:
        """Read a token each."""
        return self.cell(inputs, memory)


class MappedNeurons(Neurons):
    """The same for `torch.func.vmap`, which knows no ``lstm_cell``."""

    def remember(self, inputs: Tensor, memory: Memory) -> Memory:
        """Read a token each."""
        hidden, state = memory
        cell = self.cell
        gates = linear(inputs, cell.weight_ih, cell.bias_ih)
        gates = gates + linear(hidden, cell.weight_hh, cell.bias_hh)
        enter, forget, update, out = gates.chunk(4, -1)
        state = forget.sigmoid() * state + enter.sigmoid() * update.tanh()
        return out.sigmoid() * state.tanh(), state


def _vector_env(number: int) -> VectorEnv[np.ndarray, np.ndarray, np.ndarray]:
    return SyncVectorEnv([SwingUp for _ in range(number)])


def sample(agent: nn.Module, population: int, seed: int = 1) -> list[np.ndarray]:
    """Sample a generation of pycma from zeros."""
    start = np.zeros(sum(part.numel() for part in agent.parameters()))
    options = {"popsize": population, "verbose": -9, "seed": seed}
    return list(cma.CMAEvolutionStrategy(start, 0.1, options).ask())


def member_by_member(
    layer: AttentionNeuronPooling, episodes: int
) -> Callable[[], float]:
    """Return a function that plays eight members and returns seconds per useful step.

    Each plays its episodes in one vector environment, until the last has ended.
    """
    agent, env = Neurons(layer), _vector_env(episodes)
    size = agent.cell.hidden_size
    vectors = sample(agent, 8)

    @torch.no_grad()
    def play() -> float:
        began, useful = time.perf_counter(), 0
        for vector in vectors:
            values = torch.as_tensor(vector, dtype=torch.float32)
            vector_to_parameters(values, agent.parameters())
            observations, _ = env.reset(seed=0)
            action = torch.zeros(episodes, 1)
            memory = (torch.zeros(5 * episodes, size), torch.zeros(5 * episodes, size))
            alive = np.ones(episodes, bool)
            while alive.any():
                action, memory = agent(torch.from_numpy(observations), action, memory)
                observations, _, ended, late, _ = env.step(action.numpy())
                useful += int(alive.sum())
                alive &= ~(ended | late)
        return (time.perf_counter() - began) / useful

    return play


def population_mapped(
    layer: AttentionNeuronPooling, population: int, episodes: int, steps: int
) -> Callable[[], float]:
    """Return a function that returns the seconds of a step of the whole population.

    `torch.func.vmap` runs over the members; all episodes are in one vector environment,
    which resets those that end.
    """
    agent, env = MappedNeurons(layer), _vector_env(population * episodes)
    vectors = torch.as_tensor(np.stack(sample(agent, population)), dtype=torch.float32)
    parameters = dict(agent.named_parameters())
    parts = vectors.split([part.numel() for part in parameters.values()], 1)
    weights = {
        name: part.reshape(population, *parameter.shape)
        for (name, parameter), part in zip(parameters.items(), parts, strict=True)
    }
    act = vmap(lambda member, *inputs: functional_call(agent, member, inputs))
    shape = (population, 5 * episodes, agent.cell.hidden_size)

    @torch.no_grad()
    def play() -> float:
        observations, _ = env.reset(seed=0)
        action = torch.zeros(population, episodes, 1)
        memory = (torch.zeros(shape), torch.zeros(shape))
        began = time.perf_counter()
        for _ in range(steps):
            tokens = torch.from_numpy(observations).unflatten(0, (population, episodes))
            action, memory = act(weights, tokens, action, memory)
            observations, *_ = env.step(action.flatten(0, 1).numpy())
        return (time.perf_counter() - began) / steps

    return play
