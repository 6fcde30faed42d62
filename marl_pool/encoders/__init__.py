"""Encoders: from a set of vectors to a set of vectors."""

from typing import TYPE_CHECKING, Any

from marl_pool.construction import build

if TYPE_CHECKING:
    from marl_pool.encoders.base import Encoder

ENCODERS: dict[str, str] = {
    "identity": "marl_pool.encoders.identity:IdentityEncoder",
    "learned_merging": "marl_pool.encoders.learned_merging:LearnedMergingEncoder",
    "lstm": "marl_pool.encoders.lstm:LSTMEncoder",
    "set_linear": "marl_pool.encoders.set_linear:SetLinearEncoder",
    "set_transformer": "marl_pool.encoders.set_transformer:SetTransformerEncoder",
    "swarm": "marl_pool.encoders.swarm:SwarmEncoder",
    "transformer": "marl_pool.encoders.transformer:TransformerEncoder",
}


def encoder_names() -> list[str]:
    """The registered encoders."""
    return sorted(ENCODERS)


def make_encoder(name: str, **options: Any) -> "Encoder":
    """Build an encoder.

    Args:
        name: one of `encoder_names`, or ``package.module:Class`` of your own.
        **options: of its constructor.

    Raises:
        InputError: an unknown name or a wrong option.
    """
    from marl_pool.encoders.base import Encoder

    return build(name, ENCODERS, "encoder", Encoder, options)
