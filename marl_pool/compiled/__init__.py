"""The compiled kernel in torch's place: policies and networks that call it.

Networks and policies are plain torch. Code that computes many steps with one calls
`compile` once, for its compiled counterpart.
"""

from typing import Any, TypeVar

from torch import nn

from marl_pool.compiled.network import CompiledSetNetwork, compile_network
from marl_pool.compiled.policy import CompiledTokenPolicy, compile_policy
from marl_pool.networks.set_network import SetNetwork
from marl_pool.options.signatures import show
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.utils.errors import InputError

Module = TypeVar("Module", bound=nn.Module)


def compile(module: Module) -> Module:
    """Return a policy or set network that computes the same by the compiled kernel.

    It shares the parameters, buffers and mode of the original, so an optimizer's step,
    `load_state_dict`, `to`, `train` or `eval` of either one affects both. Modules,
    options and hooks are inspected only here: compile again after changing those. In
    each call torch computes what the kernel does not, such as under autocast, in
    `torch.compile` or within ``use_kernels("torch")``.

    Example:
        >>> policy = marl_pool.compile(marl_pool.load_policy("runs/demo/policy"))
        >>> policy.act(tokens).action

    Args:
        module: a `TokenPolicy` or `SetNetwork`, or any other module.

    Returns:
        A `CompiledTokenPolicy` or `CompiledSetNetwork`, with the module as its
        ``original``; or the module itself if the kernel computes nothing of it: a
        subclass, a module with hooks, another encoder and whatever else docs/kernels.md
        names.

    Raises:
        InputError: anything but a module.
    """
    compiled: Any = module
    if not isinstance(module, nn.Module):
        raise InputError(f"module: expected a torch Module, got {show(module):.100}")
    if isinstance(module, TokenPolicy):
        compiled = compile_policy(module)
    elif isinstance(module, SetNetwork):
        compiled = compile_network(module)
    return compiled


def compile_parts(module: Module) -> Module:
    """Compile a module, after replacing the set networks inside it in place."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if type(child) is SetNetwork:
                setattr(parent, name, compile_network(child))
    return compile(module)


__all__ = [
    "CompiledSetNetwork",
    "CompiledTokenPolicy",
    "compile",
    "compile_parts",
]
