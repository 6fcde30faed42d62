"""Check that a model of sets ignores padding, and nothing but padding."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from marl_pool.tokens import Tokens, like
from marl_pool.utils.errors import InputError, described, first_line

Key = str | int
Parts = dict[Any, Tensor]

DRAWS = 8
"""Random changes of an entity that are tried before it counts as ignored."""
ADDED = 3
"""Padded slots that the check ``amount`` appends."""
NEAR_ZERO = 1e-6
"""Features near zero, relative to their mean magnitude where that is below 1."""
JUMP = 1e-3
"""Largest change of the output, from features near zero to zero, that is no jump."""
TOLERANCES = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 0.02,
    torch.bfloat16: 0.1,
}
"""Largest relative change of the output, by dtype, that counts as rounding."""


@dataclass(frozen=True)
class MaskReport:
    """Result of `check_mask`; true if nothing failed."""

    failures: dict[str, str]
    """A sentence for each check that failed."""
    skipped: dict[str, str]
    """The reason for each check that could not be run."""
    passed: tuple[str, ...]
    """Names of the checks that passed."""

    def __bool__(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        lines = [f"{name}: FAILED, {text}" for name, text in self.failures.items()]
        lines += [f"{name}: ok" for name in self.passed]
        lines += [f"{name}: skipped, {text}" for name, text in self.skipped.items()]
        return "\n".join(lines)


def check_mask(
    model: Callable[..., Any],
    observation: Any,
    *,
    mask: Key | None = None,
    marks: Literal["padding", "present"] = "padding",
    presence: int | None = None,
    zeros: bool = False,
    invariant: bool = True,
    per_entity: bool = False,
    seed: int = 0,
) -> MaskReport:
    """Check how a model of sets treats padding; it may be any torch model.

    ==========  ====================================================================
    check       the output must …
    ==========  ====================================================================
    repeated    be the same in two calls
    content     not depend on the numbers under padding
    nan         not change where these numbers are NaN
    amount      not depend on the number of padded slots
    place       not depend on the position of padding among the entities
    order       not depend on the order of the entities (``invariant``)
    entities    depend on each entity
    zero        not jump where all features of an entity become 0, as it does if
                zeros are taken for padding
    empty       be finite for a set without entities, whatever stands under padding
    batch       be the same beside a set without entities, with finite gradients
    float16     pass content and empty in this precision; likewise bfloat16
    ==========  ====================================================================

    A module is copied, and called in evaluation mode and, if possible, in float64.

    Example:
        >>> def mean(x, padding):
        ...     return x.masked_fill(padding[..., None], 0).mean(1)
        >>> padding = torch.tensor([[False, False, True]])
        >>> observation = torch.randn(1, 3, 2), padding
        >>> sorted(check_mask(mean, observation).failures)
        ['amount']
        >>> bool(check_mask(make_pooling("ada", dim=2), observation))
        True

    Args:
        model: called with the tensors of ``observation``; returns a tensor or any
            nesting of tensors, batch first. Integer results are ignored.
        observation: ``(B, N, F)`` features; or a tuple of tensors, passed as separate
            arguments; or a mapping or `Tokens`, passed as one. Tensors ``(B, N, …)``
            hold the entities, the mask is ``(B, N)``, and all others are left
            unchanged. Some sets should have padding.
        mask: position or key of the mask; None for the only tensor of dtype bool.
        marks: whether True, or 1, in the mask marks padding or a present entity.
        presence: the feature that is 0 for padding, in place of a mask.
        zeros: padding is a row of zeros, in place of a mask.
        invariant: False for a model that reads the order of the entities.
        per_entity: True if outputs are ``(B, N, …)``, a row for each entity.
        seed: seed of the random changes.

    Returns:
        A report, which is true if all checks passed and prints a line for each.

    Raises:
        InputError: an observation without floating features, a mask or a present
            entity in each set, outputs of another shape or without numbers, or a module
            that cannot be copied.
    """
    if not callable(model):
        raise InputError(f"model: expected a callable, got {type(model).__name__}")
    sets = _parse(observation, mask, marks, presence, zeros)
    subject = _Subject(model, sets, invariant, per_entity, seed)
    if isinstance(model, nn.Module):
        subject = _best_precision(subject)
    _validate_outputs(subject)
    return _report(subject)


def assert_mask(model: Callable[..., Any], observation: Any, **options: Any) -> None:
    """Raise AssertionError with a sentence for each check of `check_mask` that fails.

    For tests: ``assert_mask(model, (features, padding))``.
    """
    report = check_mask(model, observation, **options)
    if not report:
        raise AssertionError(f"the model mistreats its mask\n{report}")


@dataclass(frozen=True)
class _PaddedSets:
    """Entities ``(B, N, …)`` by key, their padding, and the arguments made of both."""

    entities: Parts
    padding: Tensor
    call: Callable[[Parts, Tensor], tuple[Any, ...]]
    presence: int | None
    zeros: bool

    def features(self) -> Parts:
        """Return the floating-point parts, without the column that marks presence."""
        floating = {k: v for k, v in self.entities.items() if v.is_floating_point()}
        if self.presence is None:
            return floating
        columns = torch.arange(next(iter(floating.values())).shape[-1])
        return {k: v[..., columns != self.presence] for k, v in floating.items()}

    def with_features(self, features: Parts) -> "_PaddedSets":
        """Replace the features, of the form that `features` returns."""
        if (place := self.presence) is not None:
            marks = {k: v[..., place, None] for k, v in self.entities.items()}
            features = {
                key: torch.cat([new[..., :place], marks[key], new[..., place:]], -1)
                for key, new in features.items()
            }
        return replace(self, entities={**self.entities, **features})

    def map(self, function: Callable[[Tensor], Tensor]) -> "_PaddedSets":
        """Apply a function to each of the `features`."""
        features = self.features().items()
        return self.with_features({key: function(part) for key, part in features})

    def take(self, slots: Tensor) -> "_PaddedSets":
        """Return the sets with the slots ``(B, M)`` in this order."""
        rows = _indices(slots)[:, None]
        entities = {key: part[rows, slots] for key, part in self.entities.items()}
        return replace(self, entities=entities, padding=self.padding[rows, slots])

    def pad(self, count: int) -> "_PaddedSets":
        """Append ``count`` padded slots of zeros."""
        num_sets, num_slots = self.padding.shape
        places = torch.arange(num_slots + count, device=self.padding.device)
        # The new slots copy slot 0, since any integers have to be valid ones.
        slots = places.where(places < num_slots, 0)
        longer = self.take(slots.expand(num_sets, -1))
        longer = longer.hide(places >= num_slots)
        added = (places >= num_slots).expand_as(longer.padding)
        return longer.map(lambda part: part.masked_fill(like(added, part), 0))

    def hide(self, hidden: Tensor) -> "_PaddedSets":
        """Mark these slots, ``(N,)`` or ``(B, N)``, as padding too."""
        return replace(self, padding=self.padding | hidden)

    def to(self, dtype: torch.dtype) -> "_PaddedSets":
        """Cast the floating-point parts."""
        floating = {k: v.to(dtype) for k, v in self.entities.items() if _is_float(v)}
        return replace(self, entities={**self.entities, **floating})

    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the model."""
        entities = dict(self.entities)
        # `hide` and `noisy` leave numbers under padding.
        if self.zeros:
            entities = {
                key: part.masked_fill(like(self.padding, part), 0)
                for key, part in entities.items()
            }
        if self.presence is not None:
            for key, part in entities.items():
                # A copy, since the tensor may be the caller's.
                marked = part.clone()
                marked[..., self.presence] = (~self.padding).to(part.dtype)
                entities[key] = marked
        return self.call(entities, self.padding)


@dataclass(frozen=True)
class _Subject:
    """A model and the sets that it is called with."""

    model: Callable[..., Any]
    sets: _PaddedSets
    invariant: bool
    per_entity: bool
    seed: int
    generator: torch.Generator = field(default_factory=torch.Generator)

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.sets.features().values())).dtype

    def outputs(self, sets: _PaddedSets) -> list[Tensor]:
        """Call the model and return its floating outputs."""
        return [t for t in tree_leaves(self.model(*sets.arguments())) if _is_float(t)]

    def compared(self, sets: _PaddedSets, slots: Tensor | None = None) -> list[Tensor]:
        """Return the outputs that a change of padding must not change.

        Args:
            sets: the input.
            slots: ``(B, M)`` slots of the entities, if outputs are rows of entities.
        """
        with torch.no_grad():
            outputs = self.outputs(sets)
        if not self.per_entity or slots is None:
            return outputs
        rows = _indices(slots)[:, None]
        return [output[rows, slots] for output in outputs]

    def magnitude(self, part: Tensor) -> float:
        """Return the mean magnitude of features, or 1 if they are all 0."""
        # Padding may hold anything, so that only the entities tell the scale.
        return float(part[~self.sets.padding].double().abs().mean()) or 1.0

    def noisy(self, sets: _PaddedSets, where: Tensor, size: float) -> _PaddedSets:
        """Return sets with noise in the slots ``where``, ``(B, N)`` or ``(N,)``.

        Its standard deviation is ``size`` times the mean magnitude of the features.
        """

        def noise(part: Tensor) -> Tensor:
            # The same numbers in each precision and on each device.
            shape, dtype = part.shape, torch.float64
            sample = torch.randn(shape, generator=self.generator, dtype=dtype)
            mask = like(where.expand_as(sets.padding), part)
            scaled = size * self.magnitude(part) * sample
            return torch.where(mask, scaled.to(part), part)

        return sets.map(noise)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _indices(rows: Tensor) -> Tensor:
    """Return the indices of the rows, on their device."""
    return torch.arange(len(rows), device=rows.device)


def _change(
    before: list[Tensor], after: list[Tensor], usual: Sequence[Tensor] = ()
) -> float:
    """Return the largest change, relative to the largest output; inf for a NaN.

    Only finite outputs count for the scale: those before, and the ``usual`` ones.
    """
    old, new = (
        torch.cat([output.double().flatten() for output in outputs])
        for outputs in (before, after)
    )
    # Equal infinities, as of masked logits, have a difference of NaN but are no change.
    changes = (new - old).abs().masked_fill(new == old, 0)
    change = float(changes.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
    sizes = torch.cat([old, *(output.double().flatten() for output in usual)]).abs()
    finite = sizes[sizes.isfinite()]
    scale = float(finite.max()) if len(finite) else 0.0
    return change / (scale or 1.0)


def _amount(change: float) -> str:
    if change == float("inf"):
        return "to NaN or infinity"
    return f"by {change:.2g} of its magnitude"


def _sentence(
    subject: _Subject, before: list[Tensor], after: list[Tensor], cause: str
) -> str:
    """Describe the effect of a cause on the output; empty if it is mere rounding."""
    change = _change(before, after)
    return f"{cause} {_amount(change)}" if change > _tolerance(subject) else ""


def _parse(
    observation: Any, mask: Key | None, marks: str, presence: int | None, zeros: bool
) -> _PaddedSets:
    """Split an observation into entities, padding and the rest."""
    if (mask is not None) + (presence is not None) + zeros > 1:
        raise InputError("check_mask: expected one of mask, presence and zeros")
    if marks not in ("padding", "present"):
        raise InputError(f"marks: expected 'padding' or 'present', got {marks!r}")
    parts, join = _parts(observation)
    by_features = presence is not None or zeros
    # The other Boolean tensor of tokens, if any, is an action mask. It belongs to the
    # entities where it has a column for each of them.
    if isinstance(observation, Tokens) and mask is None:
        mask = "padding"
    key = None if by_features else _mask_key(parts, mask)
    features = [v for v in parts.values() if _is_float(v) and v.dim() >= 3]
    if not features:
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        raise InputError(
            f"observation: expected floating features of shape (B, N, F), got {shapes}"
        )
    if key is None:
        padding = _padding_in(features[0], presence)
    else:
        padding = parts[key].bool() if marks == "padding" else ~parts[key].bool()
    if padding.all(1).any() or not len(padding):
        raise InputError("observation: expected a present entity in each set")
    if len(padding) == 1:  # add a second set, beside which the first can be emptied
        parts = {name: torch.cat([part, part]) for name, part in parts.items()}
        padding = torch.cat([padding, padding])
    entities = {
        name: part
        for name, part in parts.items()
        if name != key and part.shape[:2] == padding.shape
    }
    if not any(map(_is_float, entities.values())):
        shapes = {name: tuple(part.shape) for name, part in parts.items()}
        raise InputError(
            f"mask: expected the shape (B, N) of the features, got {shapes}"
        )
    if presence is not None and len(entities) > 1:
        raise InputError(
            f"presence: expected one tensor of entities, got {list(entities)}"
        )

    def call(entities: Parts, padding: Tensor) -> tuple[Any, ...]:
        changed = {**parts, **entities}
        if key is not None:
            marked = padding if marks == "padding" else ~padding
            changed[key] = marked.to(parts[key].dtype)
        return join(changed)

    return _PaddedSets(entities, padding, call, presence, zeros)


def _padding_in(features: Tensor, presence: int | None) -> Tensor:
    """Return the padding ``(B, N)`` of sets without a mask.

    ``presence`` is the feature that is 0 for padding; None if padding is rows of zeros.
    """
    if presence is None:
        return (features == 0).flatten(2).all(-1)
    if not -1 < presence < features.shape[-1]:
        raise InputError(
            f"presence: expected a feature from 0 to {features.shape[-1] - 1}, got "
            f"{presence}"
        )
    return features[..., presence] == 0


def _parts(observation: Any) -> tuple[Parts, Callable[[Parts], tuple[Any, ...]]]:
    """Return an observation's tensors, and a function from them to the arguments."""
    try:
        return _tensors(observation)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            "observation: expected tensors, in a tuple or a mapping, got "
            f"{type(observation).__name__}"
        ) from error


def _tensors(observation: Any) -> tuple[Parts, Callable[[Parts], tuple[Any, ...]]]:
    if isinstance(observation, Tokens):
        return observation.columns, lambda parts: (Tokens(*parts.values()),)
    if isinstance(observation, Mapping):
        parts = {key: torch.as_tensor(part) for key, part in observation.items()}
        return parts, lambda parts: (parts,)
    if not isinstance(observation, tuple | list):
        observation = (observation,)
    return (
        {index: torch.as_tensor(part) for index, part in enumerate(observation)},
        lambda parts: tuple(parts[index] for index in range(len(parts))),
    )


def _mask_key(parts: Parts, mask: Key | None) -> Key:
    """Return the key of the mask ``(B, N)``."""
    if mask is None:
        booleans = [key for key, part in parts.items() if part.dtype == torch.bool]
        flat = [key for key in booleans if parts[key].dim() == 2]
        if len(flat) != 1:
            raise InputError(
                "mask: expected its position or key, or presence= or zeros=, since "
                f"{len(flat)} of {list(parts)} are a (B, N) tensor of dtype bool"
            )
        return flat[0]
    if mask not in parts or parts[mask].dim() != 2:
        raise InputError(
            f"mask: expected the position or key of a (B, N) tensor, one of "
            f"{list(parts)}, got {mask!r}"
        )
    return mask


def _best_precision(subject: _Subject) -> _Subject:
    """Return the subject in float64, or as it is if the model cannot be cast."""
    try:
        # In float64 rounding is far smaller than the effect of a leak.
        exact = _in_precision(subject, torch.float64)
        exact.compared(exact.sets)
    except (RuntimeError, TypeError, NotImplementedError):
        return _in_precision(subject, subject.dtype)
    return exact


def _in_precision(subject: _Subject, dtype: torch.dtype) -> _Subject:
    """Return a copy of the subject in evaluation mode, parameters and features cast."""
    # A copy, since the caller may be training the model.
    assert isinstance(subject.model, nn.Module)
    model = _copied(subject.model).eval().to(dtype)
    return replace(subject, model=model, sets=subject.sets.to(dtype))


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a module, without the graph of an earlier call.

    torch refuses to copy tensors that have one, such as attention weights that the
    module keeps, or the weight that `torch.nn.utils.weight_norm` computes.
    """
    attributes = [vars(module) for module in model.modules()]
    computed = {
        id(value): value.detach().clone()
        for value in tree_leaves(attributes)
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return deepcopy(model, computed)
    except (RuntimeError, TypeError) as error:
        text = first_line(error)[:100]
        raise InputError(
            f"model: expected a module that can be copied, got the error: {text}"
        ) from error


def _validate_outputs(subject: _Subject) -> None:
    rows = (
        subject.sets.padding.shape
        if subject.per_entity
        else subject.sets.padding.shape[:1]
    )
    outputs = subject.outputs(subject.sets)
    shapes = [tuple(output.shape) for output in outputs]
    if not outputs or any(output.shape[: len(rows)] != rows for output in outputs):
        raise InputError(
            f"model: expected floating outputs whose shapes begin with {tuple(rows)}, "
            f"got {shapes}"
        )
    if not any(output.numel() for output in outputs):
        raise InputError(f"model: expected an output that is not empty, got {shapes}")


def _report(subject: _Subject) -> MaskReport:
    """Run all checks."""
    failures: dict[str, str] = {}
    skipped: dict[str, str] = {}
    passed: list[str] = []
    for name, check in CHECKS.items():
        # The result of a check does not depend on the checks before it.
        subject.generator.manual_seed(subject.seed)
        try:
            sentence = check(subject)
        except _SkippedError as reason:
            skipped[name] = str(reason)
            continue
        except Exception as error:
            # A model may reject NaN, or a set without entities.
            sentence = f"it raises {described(error)}"
        if sentence:
            failures[name] = sentence
        else:
            passed.append(name)
    return MaskReport(failures, skipped, tuple(passed))


class _SkippedError(Exception):
    """A check does not apply to this model or observation."""


def _repeated(subject: _Subject) -> str:
    first, second = (subject.compared(subject.sets) for _ in range(2))
    if all(map(torch.equal, first, second)):
        return ""
    return "two calls with the same input differ: the model is random or has a memory"


def _padded(subject: _Subject) -> _PaddedSets:
    """Return the sets; if none has padding, hide the last entity of each."""
    sets = subject.sets
    if sets.padding.any():
        return sets
    num_slots = sets.padding.shape[1]
    if num_slots < 2:
        raise _SkippedError("a set of one entity cannot be padded")
    return sets.hide(_indices(sets.padding[0]) == num_slots - 1)


def _slots(sets: _PaddedSets, present: bool = True) -> Tensor:
    """Return ``(B, N)`` slots, the present ones first, in order."""
    return (
        (sets.padding if present else ~sets.padding).long().argsort(dim=1, stable=True)
    )


def _tolerance(subject: _Subject) -> float:
    return TOLERANCES[subject.dtype]


def _present(subject: _Subject, sets: _PaddedSets) -> Tensor | None:
    """Return as many present slots as every set has, if outputs are per entity."""
    if not subject.per_entity:
        return None
    # Every set has as many, so that their rows make one tensor.
    return _slots(sets)[:, : int((~sets.padding).sum(1).min())]


def _content(subject: _Subject) -> str:
    if subject.sets.zeros:
        raise _SkippedError("padding is zeros")
    sets = _padded(subject)
    slots = _present(subject, sets)
    before = subject.compared(sets, slots)
    # Large numbers show where padding has a small weight.
    for size in (1.0, 1000.0):
        after = subject.compared(subject.noisy(sets, sets.padding, size), slots)
        cause = "numbers under padding move the output"
        if sentence := _sentence(subject, before, after, cause):
            return sentence
    return ""


def _nan(subject: _Subject) -> str:
    if subject.sets.zeros:
        raise _SkippedError("padding is zeros")
    sets = _padded(subject)
    slots = _present(subject, sets)
    absent = sets.map(
        lambda part: part.masked_fill(like(sets.padding, part), float("nan"))
    )
    before, after = (subject.compared(part, slots) for part in (sets, absent))
    sentence = _sentence(subject, before, after, "NaN under padding moves the output")
    hint = "NaN times 0 is NaN, so clear it by masked_fill or where, not by a product"
    return sentence and f"{sentence}: {hint}"


def _padding_amount(subject: _Subject) -> str:
    sets = _padded(subject)
    slots = _present(subject, sets)
    before = subject.compared(sets, slots)
    try:
        after = subject.compared(sets.pad(ADDED), slots)
    except (RuntimeError, ValueError, IndexError) as error:
        # Such as a model that flattens its input, which is no mistake.
        num_slots = sets.padding.shape[1]
        text = first_line(error)[:100]
        raise _SkippedError(f"it takes only {num_slots} slots ({text})") from None
    # Attention weights, for example, have as many columns as there are slots.
    pairs = [
        (old, new)
        for old, new in zip(before, after, strict=True)
        if old.shape == new.shape
    ]
    if not pairs:
        raise _SkippedError("the shape of each output depends on the number of slots")
    before, after = map(list, zip(*pairs, strict=True))
    cause = f"{ADDED} more padded slots move the output"
    return _sentence(subject, before, after, cause)


def _place(subject: _Subject) -> str:
    sets = _padded(subject)
    order = _slots(sets, present=False)
    return _moved(subject, sets, order, "padding before the entities moves")


def _order(subject: _Subject) -> str:
    if not subject.invariant:
        raise _SkippedError("the model need not be invariant")
    sets = subject.sets
    if int((~sets.padding).sum(1).max()) < 2:
        raise _SkippedError("no set has two entities")
    return _moved(
        subject,
        sets,
        _indices(sets.padding[0]).flip(0).expand_as(sets.padding),
        "the reverse order moves",
    )


def _moved(subject: _Subject, sets: _PaddedSets, order: Tensor, cause: str) -> str:
    """Compare the outputs for the slots as they are and in another order."""
    before, after = subject.compared(sets), subject.compared(sets.take(order))
    if subject.per_entity:
        rows = _indices(order)[:, None]
        present = ~sets.padding[rows, order]
        before = [output[rows, order][present] for output in before]
        after = [output[present] for output in after]
    return _sentence(subject, before, after, f"{cause} the output")


def _entities(subject: _Subject) -> str:
    sets = subject.sets
    before = subject.compared(sets)
    ignored = []
    for slot in range(sets.padding.shape[1]):
        quiet = ~sets.padding[:, slot]
        selected = _indices(sets.padding[0]) == slot
        for draw in range(DRAWS):
            if not quiet.any():
                break
            # Growing changes: a maximum or a ReLU may not notice small ones.
            after = subject.compared(subject.noisy(sets, selected, 2.0**draw))
            for old, new in zip(before, after, strict=True):
                # A critic's output is ``(B,)``, without a dimension to reduce.
                quiet &= (old == new)[..., None].flatten(1).all(1)
        ignored += [(row, slot) for row in quiet.nonzero().flatten().tolist()]
    if not ignored:
        return ""
    row, slot = ignored[0]
    return (
        f"{len(ignored)} of {int((~sets.padding).sum())} entities have no effect on "
        f"the output, such as slot {slot} of set {row}"
    )


def _zero(subject: _Subject) -> str:
    sets = subject.sets
    if sets.zeros:
        raise _SkippedError("padding is zeros")
    selected = _indices(sets.padding[0]) == _slots(sets)[:, :1]

    def filled(part: Tensor, fraction: float) -> Tensor:
        # No more than the fraction itself: the eps of a LayerNorm does not grow with
        # the features.
        value = fraction * min(subject.magnitude(part), 1.0)
        return part.masked_fill(like(selected, part), value)

    near, zero = (
        subject.compared(sets.map(partial(filled, fraction=fraction)))
        for fraction in (NEAR_ZERO, 0.0)
    )
    # The output near zero may itself be near zero, as of a sum of one entity.
    change = _change(near, zero, usual=subject.compared(sets))
    if change <= max(JUMP, _tolerance(subject)):
        return ""
    return (
        f"where all features of an entity become exactly 0, the output moves "
        f"{_amount(change)}, as if zeros were padding"
    )


def _empty(subject: _Subject) -> str:
    everything = torch.ones_like(subject.sets.padding)
    sets = subject.sets.hide(everything)
    before = subject.compared(sets)
    if not all(bool(output.isfinite().all()) for output in before):
        return "a set without entities gives NaN or infinity"
    # Padding can only be zeros, or no row of an entity is left to compare.
    if sets.zeros or subject.per_entity:
        return ""
    after = subject.compared(subject.noisy(sets, everything, 10.0))
    cause = "numbers under padding move the output of a set without entities"
    return _sentence(subject, before, after, cause)


def _batch(subject: _Subject) -> str:
    sets = subject.sets
    first = (_indices(sets.padding) == 0)[:, None].expand_as(sets.padding)
    beside = sets.hide(first)
    slots = _present(subject, sets)
    before = [output[1:] for output in subject.compared(sets, slots)]
    after = [output[1:] for output in subject.compared(beside, slots)]
    cause = "a set without entities moves the others' output"
    if sentence := _sentence(subject, before, after, cause):
        return sentence
    # A mask can hide a NaN from the result that still reaches the gradient.
    features = {k: p.clone().requires_grad_() for k, p in sets.features().items()}
    weights = [*features.values()]
    if isinstance(subject.model, nn.Module):
        weights += [w for w in subject.model.parameters() if w.requires_grad]
    outputs = subject.outputs(beside.with_features(features))
    total = sum(output[1:].double().sum() for output in outputs)
    if not (isinstance(total, Tensor) and total.requires_grad):
        return ""
    gradients = torch.autograd.grad(total, weights, allow_unused=True)
    if all(bool(g.isfinite().all()) for g in gradients if g is not None):
        return ""
    return "a set without entities makes the gradient of the others NaN or infinite"


def _low_precision(dtype: torch.dtype) -> Callable[[_Subject], str]:
    """Return a check of content and of sets without entities in this precision."""

    def check(subject: _Subject) -> str:
        if not isinstance(subject.model, nn.Module):
            raise _SkippedError("a function cannot be cast")
        try:
            cast = _in_precision(subject, dtype)
            cast.compared(cast.sets)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            text = first_line(error)[:100]
            # torch refuses to fill float16 with a number such as -1e9.
            if "overflow" in text:
                return f"a number of the mask is too large for it ({text})"
            raise _SkippedError(f"it cannot be computed ({text})") from None
        content = "" if subject.sets.zeros else _content(cast)
        return content or _empty(cast)

    return check


CHECKS: dict[str, Callable[[_Subject], str]] = {
    "repeated": _repeated,
    "content": _content,
    "nan": _nan,
    "amount": _padding_amount,
    "place": _place,
    "order": _order,
    "entities": _entities,
    "zero": _zero,
    "empty": _empty,
    "batch": _batch,
    "float16": _low_precision(torch.float16),
    "bfloat16": _low_precision(torch.bfloat16),
}
"""Checks by name; each returns a sentence, empty if it passed."""
