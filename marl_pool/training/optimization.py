"""Gradient steps, and storage of networks and optimizers in checkpoints."""

import inspect
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from marl_pool.files.tensors import write_tensors
from marl_pool.utils.errors import InputError

Tensors = Mapping[str, Tensor]


def descend(
    optimizer: Optimizer, loss: Tensor, lr: float, grad_clip: float | None = None
) -> Tensor:
    """Take a gradient step; return the global norm of the gradient before clipping.

    Args:
        optimizer: optimizer of the parameters.
        loss: scalar to minimise.
        lr: learning rate of this step.
        grad_clip: maximum global norm of the gradient, or None for no limit.

    Returns:
        The norm, a scalar.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    limit = torch.inf if grad_clip is None else grad_clip
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    optimizer.step()
    return norm


class FlatParameters:
    """Parameters of a module as views of one tensor.

    An optimizer of `values` updates all of them in one operation; many small ones would
    take longer than the arithmetic.

    Args:
        parameters: parameters on one device; their data become views.

    Attributes:
        values: the tensor, ``(total,)``.

    Raises:
        InputError: parameters of several dtypes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        if len(dtypes := {parameter.dtype for parameter in self.parameters}) > 1:
            names = sorted(map(str, dtypes))
            raise InputError(f"parameters: expected one dtype, got {', '.join(names)}")
        with torch.no_grad():
            self.values = nn.Parameter(
                torch.cat([p.flatten() for p in self.parameters])
            )
        for parameter, view in zip(
            self.parameters, self.split(self.values.detach()), strict=True
        ):
            parameter.data = view
        # Memory for gradients that autograd does not allocate.
        self._gradient = torch.zeros_like(self.values.detach())
        self._gradients = self.split(self._gradient)

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return views of ``flat`` ``(total,)`` in the shapes of the parameters."""
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [p.view_as(q) for p, q in zip(parts, self.parameters, strict=True)]

    def zero_grad(self) -> None:
        """Set all gradients to None."""
        for parameter in self.parameters:
            parameter.grad = None

    def is_plain(self, unused_parameters: Collection[nn.Parameter] = ()) -> bool:
        """Return True if every parameter is trained, without hooks on its gradient.

        Args:
            unused_parameters: exceptions, which are not trained and have gradient 0.
        """
        ids = set(map(id, unused_parameters))
        return all(
            (p.requires_grad and not p._backward_hooks) or id(p) in ids
            for p in self.parameters
        )

    def view_grad(self) -> None:
        """Make the parameters' gradients views of `values`' gradient, set to zero."""
        self.values.grad = self._gradient.zero_()
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def gather_grad(self) -> Tensor:
        """Copy the parameters' gradients to `values`' ``(total,)``, and return it."""
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters
        ]
        self.values.grad = torch._utils._flatten_dense_tensors(gradients)
        return self.values.grad


class FlatAdam(torch.optim.Adam):
    """Fused Adam of one tensor, whose steps cost little more than the arithmetic.

    The steps equal `torch.optim.Adam`'s, bit for bit. Once a large network has filled
    the cache, torch's Python code takes several times as long as these steps.

    Args:
        values: the tensor; its gradient must be set before each step.
        lr: learning rate.

    Attributes:
        found_inf: tensor, 1.0 to skip a step, else 0.0; the default None skips none.
    """

    found_inf: Tensor | None = None

    # Torch's wrappers of these first import dynamo, inductor and sympy, for 1.5 s.
    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)

    def __init__(self, values: nn.Parameter, lr: float = 1e-3) -> None:
        super().__init__([values], lr=lr, fused=True)

    @override
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        (values,) = group["params"]
        state = self.state[values]
        if not state:
            # Torch's initial state.
            state["step"] = torch.zeros((), device=values.device)
            state["exp_avg"] = torch.zeros_like(values)
            state["exp_avg_sq"] = torch.zeros_like(values)
        state["step"] += 1
        torch._fused_adam_(
            [values],
            [values.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=self.found_inf,
        )
        if self.found_inf is not None:
            # A skipped step does not count, as in torch.
            state["step"] -= self.found_inf

    # Otherwise torch wraps each step in a profiler record.
    step.hooked = True  # type: ignore[attr-defined]


def moments(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the tensors of an optimizer's state by ``parameter number/name``."""
    return {
        f"{number}/{name}": tensor
        for number, state in optimizer.state_dict()["state"].items()
        for name, tensor in state.items()
    }


def load_moments(optimizer: Optimizer, tensors: Tensors) -> None:
    """Restore an optimizer's state from `moments`, if there are any."""
    state: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in tensors.items():
        number, _, name = key.partition("/")
        # Clone it: the optimizer changes its state in place.
        state[int(number)][name] = tensor.clone()
    if state:
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def write_parts(parts: Mapping[str, Tensors], file: Path) -> None:
    """Write the tensors of several parts under names of the form ``part/name``."""
    nested = {
        f"{part}/{name}": tensor
        for part, tensors in parts.items()
        for name, tensor in tensors.items()
    }
    write_tensors(nested, file)


def read_parts(file: Path, device: str = "cpu") -> dict[str, dict[str, Tensor]]:
    """Read what `write_parts` wrote; a part without tensors is empty."""
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for key, tensor in load_file(file, device=device).items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    return parts
