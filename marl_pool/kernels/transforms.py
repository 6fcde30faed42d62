"""Detection of torch's function transforms, under which plain operations are needed."""

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad


def is_transformed() -> bool:
    """Return whether torch records or transforms the operations of the current call.

    True under ``torch.compile``, ``torch.export`` and ``torch.jit.trace``, under the
    transforms of ``torch.func`` (``vmap``, ``grad``, ``jvp``, …) and in forward-mode
    autograd. There, code with hand-written gradients, ``out=`` arguments, reused memory
    or a Python branch on a tensor's values has to take a plain path.
    """
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or _are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
