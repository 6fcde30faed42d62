"""Detection of function transforms, under which only plain operations work."""

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Return True if torch records or transforms the operations of the current call.

    That is so under ``torch.compile``, ``torch.export`` and ``torch.jit.trace``, under
    the transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp``, …) and in
    forward-mode autograd. There, code with hand-written gradients, ``out=`` arguments,
    reused memory or a Python branch on a tensor's values must use plain operations.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
