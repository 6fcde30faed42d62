"""Steps of a rollout as a CUDA graph, which one call to the driver launches."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

MOST_STEPS = 16
"""Most steps in a graph. More would save nothing, and take longer to capture."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Capture what a function does with tensors; the result repeats it."""


def capture_on(device: torch.device, function: Callable[[], None]) -> Replay:
    """Capture a function on a GPU, after running it twice to fill caches.

    Raises:
        RuntimeError: the function waits for the device, which a graph cannot.
    """
    # A graph records the stream of the current device.
    with torch.cuda.device(device):
        function()
        with _errors_at_waits():
            function()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay


@contextmanager
def _errors_at_waits() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class StepGraph:
    """Some steps of a rollout, captured once and replayed from any state.

    A step of a few thousand environments is hundreds of small operations, and launching
    them takes longer than computing them. If no values are read, every step does the
    same operations on tensors of the same shapes, so they are captured: from the
    rollout's state in fixed tensors, to the next state in the same tensors.

    Args:
        capture: such as `capture_on` for a device.
        load: sets the state of the rollout, a pytree.
        play: takes the steps; returns what it recorded, a pytree, and the next state.
        state: a state of the rollout.

    Raises:
        RuntimeError: the steps cannot be captured.
    """

    def __init__(
        self,
        capture: Capture,
        load: Callable[[Any], None],
        play: Callable[[], tuple[Any, Any]],
        state: Any,
    ) -> None:
        self._state, self._structure = tree_flatten(_copy(state))
        # The replay writes into the tensors of the capture, which comes last.
        self._recorded: Any = None

        def steps() -> None:
            # Copies, since what is recorded must not change with the state.
            load(_copy(tree_unflatten(self._state, self._structure)))
            self._recorded, after = play()
            _write(self._state, tree_flatten(after)[0])

        # Every run continues from the state of the one before, so all may be captured.
        self._replay = capture(steps)

    def run(self, state: Any) -> tuple[Any, Any]:
        """Take the steps from a state; return what they recorded and the next state."""
        leaves, structure = tree_flatten(state)
        if structure != self._structure:
            raise RuntimeError("the state has another structure than the captured one")
        _write(self._state, leaves)
        self._replay()
        after = tree_unflatten(self._state, self._structure)
        return _copy(self._recorded), _copy(after)


def _copy(tree: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, tree)


def _write(to: list[Any], values: list[Any]) -> None:
    """Write tensors in place; numbers must equal the captured ones.

    A number that changed is part of what the graph computes: it would stay the same in
    each replay.
    """
    tensors: tuple[list[Tensor], list[Tensor]] = ([], [])
    for before, value in zip(to, values, strict=True):
        if (
            isinstance(before, Tensor)
            and before.shape == value.shape
            and before.dtype == value.dtype
        ):
            tensors[0].append(before)
            tensors[1].append(value)
        elif isinstance(before, Tensor) or before != value:
            raise RuntimeError(f"the steps change {before!r} to {value!r}")
    torch._foreach_copy_(*tensors)
