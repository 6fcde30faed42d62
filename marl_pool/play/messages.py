"""Messages from a page: small JSON objects with a field ``do``."""

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

from marl_pool.options.types import UnitInterval
from marl_pool.play.episodes import HAND, ORDER
from marl_pool.utils.errors import InputError

MAX_BYTES = 1024
"""Maximum size of a message; a larger one closes the connection."""
MAX_SPEED = 240.0
"""Maximum steps per second that a page may request."""

MAX_SEED = (1 << 53) - 1
"""Maximum seed, since numbers of JavaScript have 53 bits."""


def _known_part(name: str) -> str:
    if name == HAND or name not in ORDER:
        raise ValueError(f"expected one of {', '.join(ORDER[1:])}")
    return name


Index = Annotated[int, Field(ge=0, lt=100_000)]
Coordinate = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]


class Message(BaseModel):
    """Base of messages, which rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PauseMessage(Message):
    """Pause or continue."""

    do: Literal["pause"]
    on: bool


class SpeedMessage(Message):
    """Set the speed in steps per second."""

    do: Literal["speed"]
    value: Annotated[float, Field(ge=0.1, le=MAX_SPEED)]


class PlainMessage(Message):
    """Take one step, restart, start the next episode, shuffle, or undo changes."""

    do: Literal["step", "restart", "next", "shuffle", "clear"]


class SeedMessage(Message):
    """Play the first episode of another seed."""

    do: Literal["seed"]
    value: Annotated[int, Field(ge=0, le=MAX_SEED)]


class SeverityMessage(Message):
    """Set the severity of one perturbation."""

    do: Literal["severity"]
    name: Annotated[str, AfterValidator(_known_part)]
    value: UnitInterval


class TokenMessage(Message):
    """Occlude, freeze or duplicate an entity, or undo it."""

    do: Literal["occlude", "freeze", "duplicate"]
    entity: Index


class MoveMessage(Message):
    """Move an entity to a place in the environment's coordinates."""

    do: Literal["move"]
    entity: Index
    x: Coordinate
    y: Coordinate


class PushMessage(Message):
    """Push the pole; positive to the right."""

    do: Literal["push"]
    value: Annotated[float, Field(ge=-1, le=1)]


class DistractorsMessage(Message):
    """Set the number of added distractors."""

    do: Literal["distractors"]
    value: Annotated[int, Field(ge=0, le=32)]


class ObserveMessage(Message):
    """Show the perception of an agent."""

    do: Literal["observe"]
    agent: Index


AnyMessage = (
    PauseMessage
    | SpeedMessage
    | PlainMessage
    | SeedMessage
    | SeverityMessage
    | TokenMessage
    | MoveMessage
    | PushMessage
    | DistractorsMessage
    | ObserveMessage
)
_ADAPTER: TypeAdapter[AnyMessage] = TypeAdapter(
    Annotated[AnyMessage, Field(discriminator="do")]
)


def parse_message(text: str | bytes) -> AnyMessage:
    """Parse and check one message.

    Raises:
        InputError: it is not one of these messages.
    """
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "message"
        value = f"{first['input']!r:.60}"
        raise InputError(f"{where}: {first['msg']}, got {value}") from None
