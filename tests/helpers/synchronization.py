"""Count operations that would make the host wait for a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "allclose",
    "bincount",
    "equal",
    "histc",
    "is_nonzero",
    "item",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_consecutive",
    "unique_dim",
}
"""Operations for whose result, or its size, the host waits."""
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that call `nonzero` if an index is a mask."""
TO_HOST = {"cpu", "numpy", "tolist", "__array__", "to"}
FROM_HOST = {"as_tensor", "tensor", "new_tensor", "from_numpy", "asarray"}
ITEMS = {"__getitem__", "__setitem__"}


class _Operations(TorchDispatchMode):
    """Records operations that read values, including those inside others."""

    def __init__(self, operations: list[str]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, overload = func._schema.name.partition("::")[2], func._overloadname
        sized = name == "repeat_interleave" and overload == "Tensor"
        if sized or name in READS:
            self.operations.append(name)
        if name in INDEXING and any(_is_mask(index) for index in args[1]):
            self.operations.append(f"{name} by a mask")
        return func(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    """Records transfers, which dispatch no operation if all tensors are on the CPU."""

    def __init__(self, operations: list[str]) -> None:
        super().__init__()
        self.operations = operations

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = (resolve_name(func) or getattr(func, "__name__", "")).split(".")[-1]
        if name in TO_HOST and (name != "to" or "cpu" in map(str, args)):
            self.operations.append(name)
        if name in FROM_HOST and not any(
            isinstance(part, Tensor) for part in args[-1:]
        ):
            self.operations.append(name)
        if name in ITEMS and _has_list(args[1]):
            self.operations.append(f"{name} by a list")
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _has_list(index: Any) -> bool:
    return any(
        isinstance(i, list) for i in (index if type(index) is tuple else [index])
    )


@contextmanager
def count_syncs() -> Iterator[list[str]]:
    """Yield a list that receives the names of operations that wait for a GPU."""
    operations: list[str] = []
    with _Operations(operations), _Functions(operations):
        yield operations
