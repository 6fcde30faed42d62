"""Generic tokenizer: each number of a flat observation is a token."""

from torch import Tensor
from typing_extensions import override

from marl_pool.envs.tokenizers.base import Observer, Tokenizer
from marl_pool.tokens import Tokens, TokenSpec


class FeatureTokenizer(Tokenizer):
    """Each number of an observation is a token of its own type.

    Token i has one feature, ``observation[i]``, and the type ``feature_i``. Only the
    type identifies a number, so a policy needs a type embedding. No token belongs to
    the observing agent.
    """

    def __init__(self, observer: Observer) -> None:
        names = tuple(f"feature_{i}" for i in range(observer.size))
        spec = TokenSpec(observer.size, 1, names, has_self=False, positions=())
        super().__init__(observer, spec, range(observer.size))

    @override
    def __call__(self, observations: Tensor) -> Tokens:
        return self.tokens(observations[..., None])
