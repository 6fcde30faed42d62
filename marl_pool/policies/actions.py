"""Action spaces and the distributions over them."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import pad

from marl_pool.options.types import Extent
from marl_pool.policies.action_spaces import ActionRows, Selection
from marl_pool.tokens import Tokens, form_of
from marl_pool.utils.devices import constant
from marl_pool.utils.errors import InputError


@dataclass(frozen=True)
class ActionSpec:
    """An action space as `ActionRows` flattens it, JSON-ready.

    There are four kinds. An action of ``Discrete(n)`` is an integer ``()``, one of a
    bounded Box a vector of numbers ``(A,)``, and one of several choices, as in a
    MultiDiscrete, a vector of integers ``(K,)``. Choices together with a Box are a
    vector of ``K + A`` floats, the choices first.

    Attributes:
        n: number of options of the only choice; 0 for another space.
        low: lower bounds of the Box; empty without one.
        high: upper bounds of the Box.
        choices: number of options of each of several choices, or of any choices with a
            Box.
        num_fixed: options of a `Selection` that select no token; 0 for other spaces.
        selects: names of the types of tokens that can be selected; empty for none.
    """

    n: Extent = 0
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    choices: tuple[Extent, ...] = ()
    num_fixed: Extent = 0
    selects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("low", "high", "choices", "selects"):  # lists if read from JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sizes = (self.n, self.num_fixed, *self.choices)
        if not all(
            isinstance(size, int | np.integer) and not isinstance(size, bool)
            for size in sizes
        ):
            raise InputError(f"action space: expected integers as sizes, got {self!r}")
        bounds = (*self.low, *self.high)
        numeric = all(isinstance(bound, int | float | np.number) for bound in bounds)
        if not numeric or not all(
            -math.inf < low <= high < math.inf
            for low, high in zip(self.low, self.high, strict=False)
        ):
            raise InputError(
                f"action space: expected finite bounds, low at most high, got {self!r}"
            )
        has_parts = bool(self.low or self.choices)
        positive = self.n >= 0 and all(size > 0 for size in self.choices)
        paired = len(self.low) == len(self.high)
        if not (paired and positive) or (self.n > 0) == has_parts:
            raise InputError(f"action space: expected choices or bounds, got {self!r}")
        is_selection = bool(self.selects) and 0 < self.num_fixed < self.n
        if not is_selection and (self.selects or self.num_fixed):
            raise InputError(
                "action space: expected fixed options and tokens that can be selected, "
                f"got {self!r}"
            )

    def __str__(self) -> str:
        """Return the parts in words, such as ``a choice of 5``."""
        parts = [f"a choice of {size}" for size in self.sizes]
        if self.low:
            bounds = ", ".join(map(_interval, self.low, self.high))
            parts.append(f"numbers in {bounds}")
        return " and ".join(parts)

    @classmethod
    def of(cls, space: "spaces.Space | ActionSpec") -> "ActionSpec":
        """Convert a Gymnasium space that counts choices from 0.

        Raises:
            InputError: a space that `ActionRows` refuses, or one that counts from
                another number.
        """
        if isinstance(space, ActionSpec):
            return space
        rows = ActionRows(space)
        if not rows.counts_from_zero:
            raise InputError(
                f"action space: expected choices counted from 0, got {space}"
            )
        return cls.of_rows(rows)

    @classmethod
    def of_rows(cls, rows: ActionRows) -> "ActionSpec":
        """Describe rows, in which choices are counted from 0 whatever the space."""
        if isinstance(space := rows.space, Selection):
            return cls(
                n=rows.sizes[0], num_fixed=space.num_fixed, selects=space.selects
            )
        if rows.is_scalar:
            return cls(n=rows.sizes[0])
        return cls(low=rows.low, high=rows.high, choices=rows.sizes)

    @property
    def discrete(self) -> bool:
        """True for Discrete, whose action is a number, not a vector."""
        return self.n > 0

    @property
    def integral(self) -> bool:
        """True if actions are int64: there is no Box."""
        return not self.low

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of options of each choice."""
        return (self.n,) if self.discrete else self.choices

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of an action."""
        return () if self.discrete else (len(self.choices) + len(self.low),)

    @cached_property
    def num_options(self) -> int:
        """Number of options of all choices."""
        return sum(self.sizes)

    def mask_width(self, num_tokens: int) -> int:
        """Return the width of the action mask of an agent that perceives N tokens."""
        # A selection has an option for each token that is perceived.
        return self.num_fixed + num_tokens if self.selects else self.num_options

    def mask_of(self, tokens: Tokens) -> Tensor | None:
        """Return the action mask of tokens of batch ``(*B,)``; None without one.

        Raises:
            InputError: a mask of another shape or dtype.
        """
        if (mask := tokens.action_mask) is None:
            return None
        shape = (*tokens.batch_shape, self.mask_width(tokens.num_tokens))
        if mask.shape != shape or mask.dtype != torch.bool:
            raise InputError(
                f"action_mask: expected bool of shape {shape}, got {form_of(mask)}"
            )
        return mask

    @property
    def num_logits(self) -> int:
        """L: one for each option, and a mean and a log-std for each number of a Box."""
        return self.num_options + 2 * len(self.low)

    @property
    def dim(self) -> int:
        """A: the width of an action as a vector; see `to_vectors`."""
        return self.num_options + len(self.low)

    @property
    def noise_size(self) -> int:
        """Number of uniform random numbers that one sample consumes."""
        return len(self.sizes) + len(self.low)

    @cached_property
    def bounds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Lowest and highest numbers of an action that is a vector."""
        most = tuple(size - 1 for size in self.choices)
        return (0,) * len(most) + self.low, most + self.high

    def space(self) -> spaces.Space[Any]:
        """Return a Gymnasium space of this spec; its Box has float32 numbers."""
        low, high = (np.array(bound, np.float32) for bound in (self.low, self.high))
        if self.selects:
            return Selection(self.num_fixed, self.n - self.num_fixed, self.selects)
        if self.discrete:
            return spaces.Discrete(self.n)
        if not self.choices:
            return spaces.Box(low, high)
        choices = spaces.MultiDiscrete(list(self.choices))
        return spaces.Tuple((choices, spaces.Box(low, high))) if self.low else choices

    def to_vectors(self, actions: Tensor) -> Tensor:
        """Convert actions to the vectors ``(*B, A)`` that a recurrent policy receives.

        Choices become one-hot; numbers of a Box are clipped to [-1, 1], as the
        environment clips them, in float32: the last bits of a float64 depend on the
        order of the tokens, and would enter the memory.
        """
        if self.discrete:
            options = torch.arange(self.n, device=actions.device)
            return (actions[..., None] == options).long()
        count = len(self.choices)
        numbers = actions[..., count:].clamp(-1, 1).float()
        if not count:
            return numbers
        # Repeat each choice for all of its options.
        owners, options = (
            constant(numbers, actions.device) for numbers in _options(self.choices)
        )
        vectors = actions[..., owners] == options
        if self.integral:
            return vectors.long()
        return torch.cat([vectors.float(), numbers], -1)

    def clip(self, actions: Tensor) -> Tensor:
        """Clip actions to the bounds of the space; choices are returned as they are."""
        if self.integral:
            return actions
        device, dtype = actions.device, actions.dtype
        low, high = (constant(bound, device, dtype) for bound in self.bounds)
        return actions.clamp(low, high)

    def allowed(self, actions: Tensor, mask: Tensor) -> Tensor:
        """Return whether each choice of ``actions`` is allowed, ``(*B, K)`` bool.

        Args:
            actions: as `sample` returns them.
            mask: ``(*B, num_options)`` bool.
        """
        choices = actions[..., None] if self.discrete else actions
        table = self.table(mask, False)
        return table.gather(-1, choices[..., : len(self.sizes), None].long())[..., 0]

    def table(self, values: Tensor, padding: float) -> Tensor:
        """Arrange numbers of options ``(*B, L)`` as ``(*B, K, M)``, a row per choice.

        M is the largest number of options; shorter rows end with ``padding``.
        """
        count, width = len(self.sizes), max(self.sizes)
        options = values[..., : self.num_options]
        if count * width == self.num_options:
            return options.unflatten(-1, (count, width))
        # The index after the last option selects the padding.
        padded = pad(options, (0, 1), value=padding)
        index = constant(_table_index(self.sizes), values.device)
        return padded.index_select(-1, index).unflatten(-1, (count, width))

    def numbers(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and log-std ``(*B, len(low))`` of the Box from logits."""
        mean, log_std = _after(self.num_options, logits).chunk(2, dim=-1)
        return mean, log_std

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready form that ``ActionSpec(**…)`` accepts."""
        parts = asdict(self)
        for name in ("choices", "selects", "num_fixed"):
            if not parts[name]:
                del parts[name]
        return parts


def _options(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return each option's choice, and its number within that choice."""
    pairs = [(k, i) for k, size in enumerate(sizes) for i in range(size)]
    return tuple(k for k, _ in pairs), tuple(i for _, i in pairs)


def _table_index(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the options of each row of `ActionSpec.table`; the total pads rows."""
    width, total, index = max(sizes), sum(sizes), []
    first = 0
    for size in sizes:
        index += [*range(first, first + size), *[total] * (width - size)]
        first += size
    return tuple(index)


NO_OPTION = -1e30
"""Logit of padding in a table of options: finite, far below `ILLEGAL_LOGIT`."""
ILLEGAL_LOGIT = -1e9
"""Logit of an action that is not allowed: finite, so that no gradient, entropy or
divergence is NaN, and so small that its probability is exactly 0."""
LOWEST_LOGIT = -1e8
"""Lower limit of other logits, far above `ILLEGAL_LOGIT`."""


def mask_logits(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Give options that are not allowed a probability of 0.

    Args:
        logits: ``(*B, L)``, options first.
        mask: ``(*B, num_options)`` bool, True for allowed options, or None to allow
            all. A choice without an allowed option has a uniform distribution.
    """
    if mask is None:
        return logits
    # The numbers of a Box are not masked.
    if numbers := logits.shape[-1] - mask.shape[-1]:
        mask = pad(mask, (0, numbers), value=True)
    return torch.where(mask, logits.clamp(min=LOWEST_LOGIT), ILLEGAL_LOGIT)


def sample(
    spec: ActionSpec, logits: Tensor, noise: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Sample actions by inverse transform; `ActionSpec` has their shapes and dtypes.

    Args:
        spec: action space.
        logits: ``(*B, L)`` parameters of the distributions.
        noise: ``(*B, noise_size)`` uniform in (0, 1).
        mask: as in `mask_logits`, by which ``logits`` were masked.
    """
    count = len(spec.sizes)
    if spec.integral:
        return sample_choices(spec, logits, logits, noise, mask)
    mean, log_std = spec.numbers(logits)
    numbers = mean + log_std.exp() * torch.special.ndtri(_after(count, noise))
    return sample_choices(spec, logits, numbers, noise, mask) if count else numbers


def sample_choices(
    spec: ActionSpec,
    logits: Tensor,
    numbers: Tensor,
    noise: Tensor,
    mask: Tensor | None = None,
) -> Tensor:
    """Sample the choices of actions whose ``numbers`` of a Box are given.

    Args:
        spec: an action space with choices.
        logits: ``(*B, ≥ num_options)``, options first.
        numbers: ``(*B, len(low))``; ignored without a Box.
        noise: ``(*B, ≥ K)`` uniform in (0, 1), choices first.
        mask: as in `sample`.
    """
    if spec.discrete:
        # A selection has an option for each token, however many there are.
        return _sample_options(logits, noise, mask, logits.shape[-1] - 1)
    allowed = None if mask is None else spec.table(mask, False)
    last = constant(tuple(size - 1 for size in spec.choices), logits.device)
    noise = noise[..., : len(spec.choices), None]
    return _join(
        spec, _sample_options(_table(spec, logits), noise, allowed, last), numbers
    )


def _sample_options(
    logits: Tensor, noise: Tensor, mask: Tensor | None, last: Tensor | int
) -> Tensor:
    """Sample an option from logits ``(*B, M)`` by noise ``(*B, 1)``."""
    # Count the cumulative probabilities below the noise.
    cumulative = logits.softmax(-1).cumsum(-1)
    # The probabilities add up to 1 only up to rounding, so scale the noise by their
    # sum.
    below = (cumulative < noise * cumulative[..., -1:]).sum(-1)
    option = below.clamp(max=last)
    if mask is None:
        return option
    # Noise that rounds to 0, or a GPU's order of summing, may hit a masked option.
    allowed = mask.gather(-1, option[..., None])[..., 0]
    return torch.where(allowed, option, logits.argmax(-1))


def mode(spec: ActionSpec, logits: Tensor) -> Tensor:
    """Return the most likely actions; shapes as in `sample`."""
    if spec.discrete:
        return logits.argmax(-1)
    return most_likely(spec, logits, spec.numbers(logits)[0])


def most_likely(spec: ActionSpec, logits: Tensor, numbers: Tensor) -> Tensor:
    """Return actions of the most likely choices and of a Box's numbers.

    Args:
        spec: action space.
        logits: ``(*B, ≥ num_options)``, options first.
        numbers: ``(*B, len(low))``.
    """
    if not spec.sizes:
        return numbers
    choices = _table(spec, logits).argmax(-1)
    return choices if spec.discrete else _join(spec, choices, numbers)


def log_prob(spec: ActionSpec, logits: Tensor, action: Tensor) -> Tensor:
    """Return the log-probability ``(*B,)`` of ``action``."""
    if spec.integral:
        return choice_log_prob(spec, logits, action)
    mean, log_std = spec.numbers(logits)
    numbers = _after(len(spec.choices), action)
    squares = ((numbers - mean) * (-log_std).exp()).square()
    volume = 0.5 * mean.shape[-1] * float(np.log(2 * np.pi))
    density = -volume - torch.add(log_std, squares, alpha=0.5).sum(-1)
    return choice_log_prob(spec, logits, action) + density if spec.sizes else density


def choice_log_prob(spec: ActionSpec, logits: Tensor, action: Tensor) -> Tensor:
    """Return the log-probability ``(*B,)`` of the choices of ``action``.

    Args:
        spec: an action space with choices.
        logits: ``(*B, ≥ num_options)``, options first.
        action: of the space.
    """
    choices = action if spec.discrete else action[..., : len(spec.choices)].long()
    log_probs = _table(spec, logits).log_softmax(-1).gather(-1, choices[..., None])
    return log_probs[..., 0] if spec.discrete else log_probs[..., 0].sum(-1)


def entropy(spec: ActionSpec, logits: Tensor) -> Tensor:
    """Return the entropy ``(*B,)`` of the distributions, in nats."""

    def of_choices() -> Tensor:
        log_probs = _table(spec, logits).log_softmax(-1)
        return -(log_probs.exp() * log_probs).sum(-1)

    def of_numbers() -> Tensor:
        _, log_std = spec.numbers(logits)
        volume = 0.5 * log_std.shape[-1] * float(1 + np.log(2 * np.pi))
        return log_std.sum(-1) + volume

    return _sum(spec, of_choices, of_numbers)


def kl_divergence(spec: ActionSpec, logits: Tensor, other_logits: Tensor) -> Tensor:
    """Return the divergence KL(``logits`` ‖ ``other_logits``), ``(*B,)``, in nats."""

    def of_choices() -> Tensor:
        log_probs, other_log_probs = (
            _table(spec, values).log_softmax(-1) for values in (logits, other_logits)
        )
        return (log_probs.exp() * (log_probs - other_log_probs)).sum(-1)

    def of_numbers() -> Tensor:
        mean, log_std = spec.numbers(logits)
        other_mean, other_log_std = spec.numbers(other_logits)
        precision = (-2 * other_log_std).exp()
        squares = ((2 * log_std).exp() + (mean - other_mean).square()) * precision
        return (other_log_std - log_std + 0.5 * squares - 0.5).sum(-1)

    return _sum(spec, of_choices, of_numbers)


def _table(spec: ActionSpec, logits: Tensor) -> Tensor:
    """Return the logits of options, in a table if there are several choices."""
    return logits if spec.discrete else spec.table(logits, NO_OPTION)


def _sum(
    spec: ActionSpec, of_choices: Callable[[], Tensor], of_numbers: Callable[[], Tensor]
) -> Tensor:
    """Return the sum over independent choices and numbers."""
    if not spec.sizes:
        return of_numbers()
    choices = of_choices() if spec.discrete else of_choices().sum(-1)
    return choices if spec.integral else choices + of_numbers()


def _after(count: int, row: Tensor) -> Tensor:
    """Return the numbers after the first ``count``; no view if ``count`` is 0."""
    return row[..., count:] if count else row


def _join(spec: ActionSpec, choices: Tensor, numbers: Tensor) -> Tensor:
    if spec.integral:
        return choices
    return torch.cat([choices.to(numbers.dtype), numbers], -1)


def _interval(low: float, high: float) -> str:
    return f"[{low:g}, {high:g}]"
