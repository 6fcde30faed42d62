"""Tokenizers, which convert flat observations of PettingZoo envs to typed tokens."""

from typing import TYPE_CHECKING

from marl_pool.options.construction import build
from marl_pool.options.plugins import Registry

if TYPE_CHECKING:
    from marl_pool.envs.tokenizers.base import Observer, Tokenizer

TOKENIZERS = Registry(
    "tokenizer",
    {
        "features": "marl_pool.envs.tokenizers.base:FeatureTokenizer",
        "simple_spread": "marl_pool.envs.tokenizers.mpe:SimpleSpreadTokenizer",
        "simple_tag": "marl_pool.envs.tokenizers.mpe:SimpleTagTokenizer",
    },
)

FITTING: dict[str, str] = {
    f"mpe2.{name}_v3": name for name in TOKENIZERS.built_in if name != "features"
}
"""Default tokenizer of a module."""


def fitting(module: str) -> str:
    """Return the default tokenizer of ``module``; ``features`` for unknown modules."""
    return FITTING.get(module.partition(":")[0], "features")


def make_tokenizer(
    name: str, observer: "Observer", kind: str = "env.tokenizer"
) -> "Tokenizer":
    """Build a tokenizer of `TOKENIZERS`, or a ``package.module:Class``.

    ``kind`` is the option that names it, for errors.

    Raises:
        InputError: an unknown name, or observations that it cannot convert.
    """
    from marl_pool.envs.tokenizers.base import Tokenizer

    return build(name, TOKENIZERS, kind, Tokenizer, {}, {"observer": observer})
