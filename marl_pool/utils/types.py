"""Annotated types of options: the signature that uses them is the schema.

It imports no torch, so that a typing error in a configuration is answered at once.
"""

from typing import Annotated

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
"""A share, in [0, 1]."""
Severity = Annotated[
    UnitInterval | tuple[UnitInterval, UnitInterval],
    Field(description="a number in [0, 1], or two: [low, high]"),
]
"""Of a perturbation; between two, each world's episode draws its own."""
Probability = Annotated[float, Field(ge=0, lt=1)]
"""A dropout probability, in [0, 1)."""
Seed = Annotated[int, Field(ge=0, lt=1 << 63, description="an integer in [0, 2**63)")]
"""Of the random streams."""
Device = Annotated[
    str,
    Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N"),
]
"""Where tensors live, by torch's name."""
Counts = Annotated[
    str,
    Field(
        pattern=r"^[0-9]+-[0-9]+-[0-9]+$",
        description="three numbers such as 1-3-28",
    ),
]
"""How many entities of each of three kinds a world has."""
