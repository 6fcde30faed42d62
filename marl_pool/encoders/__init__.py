"""Encoders, which map a set of vectors to a set of vectors."""

from typing import TYPE_CHECKING, Any

from marl_pool.options.construction import build
from marl_pool.options.plugins import Registry
from marl_pool.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from marl_pool.encoders.base import Encoder as Encoder
    from marl_pool.encoders.base import IdentityEncoder as IdentityEncoder
    from marl_pool.encoders.lstm import LSTMEncoder as LSTMEncoder
    from marl_pool.encoders.merging import (
        LearnedMergingEncoder as LearnedMergingEncoder,
    )
    from marl_pool.encoders.swarm import SetLinearEncoder as SetLinearEncoder
    from marl_pool.encoders.swarm import SwarmEncoder as SwarmEncoder
    from marl_pool.encoders.transformer import (
        SetTransformerEncoder as SetTransformerEncoder,
    )
    from marl_pool.encoders.transformer import TransformerEncoder as TransformerEncoder

ENCODERS = Registry(
    "encoder",
    {
        "transformer": "marl_pool.encoders.transformer:TransformerEncoder",
        "set_transformer": "marl_pool.encoders.transformer:SetTransformerEncoder",
        "set_linear": "marl_pool.encoders.swarm:SetLinearEncoder",
        "swarm": "marl_pool.encoders.swarm:SwarmEncoder",
        "lstm": "marl_pool.encoders.lstm:LSTMEncoder",
        "learned_merging": "marl_pool.encoders.merging:LearnedMergingEncoder",
        "identity": "marl_pool.encoders.base:IdentityEncoder",
    },
)


def encoder_names() -> list[str]:
    """Return the names of the registered encoders."""
    return sorted(ENCODERS)


def make_encoder(name: str, **options: Any) -> "Encoder":
    """Build an encoder from its name.

    Args:
        name: one of `encoder_names`, or ``package.module:Class`` of a custom encoder.
        **options: options of the encoder's constructor.

    Raises:
        InputError: an unknown name or a wrong option.
    """
    from marl_pool.encoders.base import Encoder

    return build(name, ENCODERS, "encoder", Encoder, options)


__getattr__, __dir__ = lazy_exports(__name__)
