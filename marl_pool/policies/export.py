"""Export of policies for other programs, by torch.export or as ONNX, with a check."""

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError
from typing_extensions import override

from marl_pool.files.atomic import make_folder, new_path
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.base import SpecifiedPolicy
from marl_pool.policies.token_policy import TokenPolicy
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.errors import InputError, explain_os_errors

Format = Literal["torch", "onnx"]
SUFFIXES = {"torch": ".pt2", "onnx": ".onnx"}
INPUTS = ("features", "types", "padding", "action_mask")
"""Names of the inputs; the last one only of a masked export."""
Axes = tuple[dict[int, Any], ...]
"""By input: its variable axes, each a `torch.export.Dim` with a name."""
EXTRA_TOKENS = 3
"""Tokens beyond a policy's spec with which a variable number is tested."""
TOLERANCE = 1e-4
"""Largest difference of an action, in the units of its space, relative to its size."""


class ActionNetwork(nn.Module):
    """The most likely action of a policy without a memory, as plain operations.

    Args:
        policy: in eval mode.
    """

    def __init__(self, policy: SpecifiedPolicy) -> None:
        super().__init__()
        self.policy = policy

    @override
    def forward(
        self,
        features: Tensor,
        types: Tensor,
        padding: Tensor,
        action_mask: Tensor | None = None,
    ) -> Tensor:
        """Return actions ``(B, …)`` in the units of the space; see `ActionSpec`.

        Args:
            features: ``(B, N, F)``, of the dtype of the policy's `TokenSpec`.
            types: ``(B, N)`` int64.
            padding: ``(B, N)`` bool, True where there is no token.
            action_mask: ``(B, num_options)`` bool, True for options that are allowed,
                ``(B, num_fixed + N)`` where tokens are selected; None for all.
        """
        tokens = Tokens(features[:, None], types[:, None], padding[:, None])
        if action_mask is not None:
            tokens = tokens._replace(action_mask=action_mask[:, None])
        return self.policy.scale(self.policy.act(tokens).action)[:, 0]


def export_policy(
    policy: SpecifiedPolicy, path: Path, to: Format, *, masked: bool = False
) -> float:
    """Write a policy to a file, and compare it with the policy on random tokens.

    The batch size is variable, on the axis ``batch``. So is the number of tokens, on
    the axis ``tokens``, if the policy can act on more than in its spec; otherwise it is
    the spec's. Where tokens are selected, the mask has an option for each of them.

    Args:
        policy: a policy without a memory.
        path: new file.
        to: ``"torch"`` for `torch.export.load`, ``"onnx"`` for any ONNX runtime.
        masked: the file also takes an action mask.

    Returns:
        The largest difference of an action.

    Raises:
        InputError: a policy with a memory, or one without choices if ``masked``;
            operations that cannot be exported, or actions that differ by more than
            `TOLERANCE`.
    """
    if policy.recurrent:
        raise InputError(
            "export: expected a policy without a memory, got one that carries "
            "previous actions and readings from step to step"
        )
    if masked and not policy.actions.sizes:
        raise InputError("export: expected no action mask, since actions are a Box")
    if path.exists():
        raise InputError(f"{path} exists; choose another --out")
    with explain_os_errors(f"{path} cannot be written"):
        make_folder(path.parent)
        # Try to write before the export, which takes seconds.
        with NamedTemporaryFile(dir=path.parent):
            pass
    with (
        _in_eval_mode(policy),
        torch.no_grad(),
        _without_warnings(),
        new_path(path) as beside,
    ):
        network, free = ActionNetwork(policy), _allows_more_tokens(policy)
        try:
            if free:
                # Where torch fixes the number nevertheless, so does the file.
                with suppress(RuntimeError, ValueError, AssertionError, UserError):
                    return _export(
                        network, beside, to, masked=masked, extra=EXTRA_TOKENS
                    )
            return _export(network, beside, to, masked=masked)
        except (ModuleNotFoundError, OSError, InputError):
            raise
        except Exception as error:  # torch's compiler raises many kinds
            raise InputError(f"export: {to} cannot: {_reason(error):.200}") from error


def _export(
    network: ActionNetwork, path: Path, to: Format, *, masked: bool, extra: int = 0
) -> float:
    """Write a network, and return the largest difference of an action.

    Args:
        network: policy to write.
        path: new file.
        to: its format.
        masked: see `export_policy`.
        extra: make the number of tokens variable, and also compare with this many more;
            0 for the number in the policy's spec.
    """
    policy = network.policy
    batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens")
    selects = isinstance(policy, TokenPolicy) and policy.selection is not None

    def inputs(count: int, extra: int = 0) -> tuple[Tensor, ...]:
        added = extra if selects else 0  # each token is an option
        mask = [_random_mask(policy.actions, count, added)] if masked else []
        return (*_random_tokens(policy.spec, count, extra), *mask)

    set_axes = {0: batch, 1: tokens} if extra else {0: batch}
    mask_axes = {0: batch}
    if extra and selects:
        mask_axes[1] = policy.actions.num_fixed + tokens
    axes = (set_axes, set_axes, set_axes, *([mask_axes] if masked else []))
    program = torch.export.export(network, inputs(3), dynamic_shapes=axes)
    _save(program, path, to, axes)
    differences = []
    for arguments in (inputs(64), inputs(64, extra)):
        expected, actual = network(*arguments), _run(path, arguments, to)
        difference = float((actual.double() - expected.double()).abs().max())
        if difference > TOLERANCE * max(1.0, float(expected.abs().max())):
            raise InputError(
                f"export: expected the actions of the policy, got a difference of "
                f"{difference:.2g}"
            )
        differences.append(difference)
    return max(differences)


def _allows_more_tokens(policy: SpecifiedPolicy) -> bool:
    """Return whether a policy also acts on sets of more tokens than its spec has."""
    arguments = _random_tokens(policy.spec, 2, EXTRA_TOKENS)
    try:
        with torch.no_grad():
            ActionNetwork(policy)(*arguments)
    except (InputError, RuntimeError):
        return False
    return True


def _reason(error: BaseException) -> str:
    """Return the first cause as one line, without colors."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error))
    return f"{type(error).__name__}: {' '.join(text.split())}"


def _save(
    program: torch.export.ExportedProgram, path: Path, to: Format, axes: Axes
) -> None:
    if to == "torch":
        # On a full disk, torch's own writer ends the process.
        content = io.BytesIO()
        torch.export.save(program, content)
        path.write_bytes(content.getbuffer())
        return
    import onnxscript  # noqa: F401  torch would report its absence differently

    count = len(program.graph_signature.user_inputs)
    converted = torch.onnx.export(
        program,
        input_names=INPUTS[:count],
        output_names=("action",),
        dynamic_shapes=axes,  # for the names of the axes
        verbose=False,
    )
    assert converted is not None
    converted.save(str(path))


def _run(path: Path, tokens: tuple[Tensor, ...], to: Format) -> Tensor:
    """Compute actions from nothing but the written file."""
    if to == "torch":
        return torch.export.load(path).module()(*tokens)
    from onnxruntime import InferenceSession

    session = InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feeds = dict(zip(INPUTS, (tensor.numpy() for tensor in tokens), strict=False))
    (action,) = session.run(None, feeds)
    return torch.from_numpy(action)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide what torch and onnxscript warn about in their own code."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _in_eval_mode(policy: SpecifiedPolicy) -> Iterator[None]:
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)


def _random_mask(actions: ActionSpec, batch: int, extra: int) -> Tensor:
    """Sample masks that allow the last option of each choice, and others.

    ``extra`` options follow the action space's.
    """
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(batch, actions.num_options + extra, generator=generator) < 0.5
    last = torch.tensor(actions.sizes).cumsum(0) - 1
    return mask.index_fill(1, last, True)


def _random_tokens(
    spec: TokenSpec, batch: int, extra: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample sets with padding; the first token is always present."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, spec.num_tokens + extra)
    size = (*shape, spec.num_features)
    if spec.dtype == "uint8":
        features = torch.randint(256, size, generator=generator, dtype=torch.uint8)
    else:
        features = torch.randn(size, generator=generator)
    types = torch.randint(len(spec.type_names), shape, generator=generator)
    padding = torch.rand(shape, generator=generator) < 0.3
    types[:, 0], padding[:, 0] = 0, False
    return features, types, padding
