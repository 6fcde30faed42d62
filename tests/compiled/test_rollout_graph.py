"""Steps by a graph, with a stand-in for CUDA's, against steps one by one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
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


def make_rollout(
    name: str = "cartpole",
    perturbation: str | None = None,
    capture: Callable[..., Any] | None = None,
) -> Rollout:
    """A rollout whose steps are captured if a capture function is given."""
    env = make_batched_env(name, 6, max_steps=7, seed=1, **ENVS[name])
    specs = {name: group.tokens for name, group in env.groups.items()}
    policies = {
        role: make_policy(group.tokens, group.action_space, seed=0)
        for role, group in env.groups.items()
    }
    built = make_perturbation(perturbation, specs=specs) if perturbation else None
    rollout = Rollout(env, policies, explore=True, sync_free=True, perturbation=built)
    if capture is not None:
        rollout.uses_graph, rollout._capture_by = True, capture
    return rollout


assert_same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


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
    ours = recorded(make_rollout(name, perturbation, capture), count)
    expected = recorded(make_rollout(name, perturbation), count)
    assert capture.replays == replays  # none in the first call
    assert_same(ours, expected)


def test_rollout_continues_from_a_state_loaded_after_capture():
    rollout, plain = make_rollout(capture=Recorder()), make_rollout()
    start = plain.state_dict()
    recorded(rollout, 4)
    rollout.load_state_dict(start)
    assert_same(recorded(rollout, 4), recorded(plain, 4))


def test_steps_that_cannot_be_captured_run_one_by_one():
    def refuse(function: Callable[[], None]) -> Callable[[], None]:
        function()
        raise RuntimeError("waits for the device")

    rollout = make_rollout(capture=refuse)
    with pytest.warns(UserWarning, match="CUDA graph: waits for the device"):
        ours = recorded(rollout, 4)
    assert not rollout.uses_graph
    assert_same(ours, recorded(make_rollout(), 4))


def test_a_state_that_changes_its_form_continues_without_a_graph(monkeypatch):
    rollout = make_rollout(capture=Recorder())
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
    reference = make_rollout()
    for fragment in ours:
        assert_same(tree_leaves(fragment), tree_leaves(reference.steps(32)))


def test_each_length_has_a_graph_until_weights_move():
    capture = Recorder()
    rollout = make_rollout(capture=capture)
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
    replay = capture_on(torch.device("cuda:1"), lambda: log.append("run"))
    replay()
    captured = ["run", "waits error", "run", "waits 0", "enter graph", "run"]
    assert log == [
        *("enter cuda:1", *captured, "leave graph", "leave cuda:1"),
        *("enter cuda:1", "replay", "leave cuda:1"),
    ]
