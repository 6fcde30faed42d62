"""Types of options, and upper bounds of their sizes; it imports no torch.

A configuration may come from somebody else. The bounds are far above what any study
needs, and are checked before memory or hours are spent: they reject mistakes and
malice, not experiments.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from marl_pool.utils.errors import InputError

LONGEST = 16_384
"""Most entries of a list."""


@dataclass(frozen=True)
class AtMost:
    """Upper bound in the annotation of an option; see `check_size`."""

    limit: int
    """Largest number that the option may be, or that a list in it may hold."""


NamedOptions = Mapping[str, Any]
"""``name`` of an encoder, a head or another part, and its options."""
Part = str | NamedOptions
"""A name, or ``{"name": …, **options}``."""
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Size = Annotated[PositiveInt, AtMost(16_384)]
"""Number of tokens, entities, pixels along an edge or numbers in a vector."""
SizeOrZero = Annotated[NonNegativeInt, AtMost(16_384)]
Extent = Annotated[int, AtMost(16_384)]
"""Size or index of which only the upper bound is checked here."""
Repeats = Annotated[PositiveInt, AtMost(1024)]
"""Number of layers, heads, stacked frames, threads or repeated updates."""
TableSize = Annotated[PositiveInt, AtMost(2048)]
"""Number of rows or columns of a fixed table, which has no weights to bound it."""
RepeatsOrZero = Annotated[NonNegativeInt, AtMost(1024)]
Processes = Annotated[PositiveInt, AtMost(1 << 14)]
"""Number of processes."""
ProcessesOrZero = Annotated[NonNegativeInt, AtMost(1 << 14)]
Episodes = Annotated[PositiveInt, AtMost(1 << 20)]
"""Number of environments, of episodes, or of the steps of one."""
Examples = Annotated[PositiveInt, AtMost(100_000_000)]
"""Number of steps or examples of a batch or data set."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LearningRate = Annotated[
    float, Field(gt=0, le=1e30, description="a number > 0 and <= 1e30")
]
"""Adam overflows at rates beyond the range of float32; any above 1 only diverges."""
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Severity = Annotated[
    UnitInterval | tuple[UnitInterval, UnitInterval],
    Field(description="a number in [0, 1], or two: [low, high]"),
]
"""Severity of a perturbation; between two, each episode samples one."""
Probability = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63, description="an integer in [0, 2**63)")]
Device = Annotated[
    str,
    Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N"),
]
StorageURL = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9+.-]*://[^/@?#\s]*(/[^?#\s]*)?$",
        description="a URL such as s3://bucket/runs, without credentials",
    ),
]
Kernels = Literal["auto", "torch", "native"]
"""Compute narrow set networks with torch, the compiled kernel, or whichever fits."""
LearningRateSchedule = Literal["constant", "linear"]
"""Keep the learning rate, or lower it to zero over the run."""
KLEstimate = Literal["last", "mean"]
"""Estimate a KL divergence on an update's last minibatch, or on all of them."""
Counts = Annotated[
    str,
    Field(
        pattern=r"^[0-9]+-[0-9]+-[0-9]+$",
        description="three numbers such as 1-3-28",
    ),
    AtMost(16_384),
]
"""Numbers of entities of three kinds."""


class Options(dict[str, Any]):
    """Section ``{"name": …, **options}``, whose name chooses a registered class.

    It is passed whole to a function such as `make_batched_env`, which checks it against
    the signature of that class.
    """

    @property
    def name(self) -> str:
        """Name of the class."""
        return self["name"]

    @property
    def arguments(self) -> dict[str, Any]:
        """Options without the name."""
        return {key: value for key, value in self.items() if key != "name"}

    @property
    def or_none(self) -> "Options | None":
        """The section; None if its name is ``none``."""
        return None if self.name == "none" else self


# Bounds


def check_size(key: str, value: Any, annotation: Any) -> None:
    """Reject a value that would allocate too much memory.

    Args:
        key: dotted, for messages.
        value: a number, text such as ``"1-3-28"``, or a list of these.
        annotation: annotation of the option, perhaps with an `AtMost`.

    Raises:
        InputError: a number above its bound, or a list that is too long.
    """
    if isinstance(value, list | tuple) and len(value) > LONGEST:
        raise InputError(
            f"{key}: expected a list of at most {LONGEST:,} entries, got {len(value):,}"
        )
    limit = limit_of(annotation)
    if limit is None:
        return
    # Check each entry of a list; options in a mapping are checked where it is built.
    if isinstance(value, list | tuple):
        for part in value:
            check_size(key, part, annotation)
    elif isinstance(value, int | float) and value > limit:
        raise InputError(f"{key}: expected at most {limit:,}, got {value:,}")
    elif isinstance(value, str):
        for part in value.split("-"):
            # int() of thousands of digits raises.
            if part.isdecimal() and (len(part) > 9 or int(part) > limit):
                raise InputError(
                    f"{key}: expected numbers of at most {limit:,}, got {value!r:.80}"
                )


def limit_of(annotation: Any) -> int | None:
    """Return the largest `AtMost` in an annotation, or None."""
    arguments = get_args(annotation)
    limits = [part.limit for part in arguments if isinstance(part, AtMost)]
    limits += [limit for part in arguments if (limit := limit_of(part))]
    return max(limits, default=None)
