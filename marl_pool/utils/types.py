"""Types of options, and sections of a configuration; it imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Severity = Annotated[
    UnitInterval | tuple[UnitInterval, UnitInterval],
    Field(description="a number in [0, 1], or two: [low, high]"),
]
"""Severity of a perturbation; of two, each episode samples its own between them."""
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
"""Compute narrow set networks by torch, by the compiled kernel, or by what fits."""
LearningRateSchedule = Literal["constant", "linear"]
"""Keep the learning rate, or lower it to zero over the run."""
Counts = Annotated[
    str,
    Field(
        pattern=r"^[0-9]+-[0-9]+-[0-9]+$",
        description="three numbers such as 1-3-28",
    ),
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
