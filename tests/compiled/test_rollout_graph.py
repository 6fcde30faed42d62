"""Steps by a graph, with a stand-in for CUDA's, against steps one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from marl_pool.compiled.graph import StepGraph, capture_on
from marl_pool.envs import make_batched_env
from marl_pool.perturbations import make_perturbation
from marl_pool.policies import make_policy
from marl_pool.rollout import Rollout

ENVS: dict[str, dict[str, Any]] = {
    "boxworld": {"random_distractors": True},
    "cartpole": {"noise_channels": 2},
    "lbforaging": {"choices": "food"},
    "mpev2_guard": {"domain": 0},
    "simple_centroid": {"counts": "2-3-8"},
    "simple_tag": {"counts": "2-2-4", "prey": "learned"},
}


class Recorder:
    """Capture like CUDA: a replay writes into the tensors of the capture."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        (graph,) = (
            cell.cell_contents
            for cell in function.__closure__ or ()
            if isinstance(cell.cell_contents, StepGraph)
        )
        function()
        captured = graph._recorded

        def replay() -> None:
            self.replays += 1
            function()
            pairs = zip(
                tree_leaves(captured), tree_leaves(graph._recorded), strict=True
            )
            for to, value in pairs:
                if isinstance(to, Tensor):
                    to.copy_(value)
            graph._recorded = captured

        return replay


def make_rollout(name: str, perturbation: str | None = None, **options: Any) -> Rollout:
    env = make_batched_env(name, 6, max_steps=7, seed=1, **ENVS[name])
    specs = [group.tokens for group in env.groups.values()]
    policies = {
        role: make_policy(group.tokens, group.action_space, seed=0, **options)
        for role, group in env.groups.items()
    }
    built = make_perturbation(perturbation, specs=specs) if perturbation else None
    return Rollout(env, policies, explore=True, sync_free=True, perturbation=built)


def recorded(rollout: Rollout, count: int) -> list[Tensor]:
    leaves = []
    for _ in range(3):
        steps = rollout.steps(count)
        leaves += tree_leaves(steps)
        leaves += tree_leaves(rollout.pop_finished())
    return leaves


@pytest.mark.parametrize(
    ("name", "count", "perturbation", "replays"),
    [
        *((name, 16, "delay", 2) for name in ENVS),
        *((name, 24, None, 6) for name in ("cartpole", "mpev2_guard")),
        *((name, 5, None, 10) for name in ("cartpole", "mpev2_guard")),
    ],
)
def test_steps_equal_those_without_a_graph(name, count, perturbation, replays):
    capture = Recorder()
    rollout = make_rollout(name, perturbation)
    rollout.uses_graph, rollout._capture_by = True, capture
    ours = recorded(rollout, count)
    expected = recorded(make_rollout(name, perturbation), count)
    assert capture.replays == replays  # none in the first call
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def test_a_state_that_is_loaded_later_is_the_one_that_continues():
    capture = Recorder()
    rollout, plain = make_rollout("cartpole"), make_rollout("cartpole")
    rollout.uses_graph, rollout._capture_by = True, capture
    start = plain.state_dict()
    recorded(rollout, 4)
    rollout.load_state_dict(start)
    torch.testing.assert_close(
        recorded(rollout, 4), recorded(plain, 4), rtol=0, atol=0, equal_nan=True
    )


def test_steps_that_cannot_be_captured_run_one_by_one():
    def refuse(function: Callable[[], None]) -> Callable[[], None]:
        function()
        raise RuntimeError("waits for the device")

    rollout = make_rollout("cartpole")
    rollout.uses_graph, rollout._capture_by = True, refuse
    with pytest.warns(UserWarning, match="CUDA graph: waits for the device"):
        ours = recorded(rollout, 4)
    assert not rollout.uses_graph
    expected = recorded(make_rollout("cartpole"), 4)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


def test_a_state_that_changes_its_form_continues_without_a_graph(monkeypatch):
    rollout = make_rollout("cartpole")
    rollout.uses_graph, rollout._capture_by = True, Recorder()
    ours = [rollout.steps(32)]
    plain = StepGraph.run
    calls: list[int] = []

    def run(self: StepGraph, state: Any) -> Any:
        calls.append(len(calls))
        return plain(self, state if len(calls) == 1 else {**state, "more": 1})

    monkeypatch.setattr(StepGraph, "run", run)
    with pytest.warns(UserWarning, match="CUDA graph: the state has another structure"):
        ours.append(rollout.steps(32))  # the second half without the graph
    assert len(calls) == 2
    assert not rollout.uses_graph
    reference = make_rollout("cartpole")
    for fragment, count in zip(ours, (32, 32), strict=True):
        expected = reference.steps(count)
        for name, part in fragment.items():
            torch.testing.assert_close(
                part._asdict(), expected[name]._asdict(), rtol=0, atol=0, equal_nan=True
            )


def test_each_length_has_a_graph_until_weights_move():
    capture = Recorder()
    rollout = make_rollout("cartpole")
    rollout.uses_graph, rollout._capture_by = True, capture
    for _ in range(3):
        rollout.steps(4)
        rollout.steps(6)
    # None in the first call of either; six steps are three times two.
    assert capture.replays == 2 * (1 + 3)
    # New numbers count; a new place needs a new graph.
    (policy,) = rollout.policies.values()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1
    rollout.steps(4)
    assert capture.replays == 9
    policy.to(torch.float64).to(torch.float32)
    rollout.steps(4)
    assert capture.replays == 9


def test_a_number_that_changes_from_step_to_step_is_refused():
    state = {"steps": 0, "x": torch.zeros(3)}

    def play() -> tuple[Any, Any]:
        state["steps"] += 1
        return (), dict(state)

    with pytest.raises(RuntimeError, match="change 0 to 1"):
        StepGraph(Recorder(), state.update, play, dict(state))


def test_a_function_is_captured_on_its_own_device_after_two_runs(monkeypatch):
    log: list[str] = []

    @contextmanager
    def entered(label: str) -> Iterator[None]:
        log.append(f"enter {label}")
        yield
        log.append(f"leave {label}")

    class Graph:
        def replay(self) -> None:
            log.append("replay")

    monkeypatch.setattr(torch.cuda, "device", lambda device: entered(str(device)))
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: entered("graph"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: log.append(f"waits {mode}")
    )
    replay = capture_on(torch.device("cuda:1"))(lambda: log.append("run"))
    replay()
    captured = ["run", "waits error", "run", "waits 0", "enter graph", "run"]
    assert log == [
        *("enter cuda:1", *captured, "leave graph", "leave cuda:1"),
        *("enter cuda:1", "replay", "leave cuda:1"),
    ]
