"""Annotated types of options; it imports no torch."""

from typing import Annotated, Literal

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
