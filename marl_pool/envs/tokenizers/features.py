"""Any flat observation: each of its numbers is a token."""

from torch import Tensor

from marl_pool.envs.tokenizers.base import Observer, Tokenizer
from marl_pool.tokens import Tokens, TokenSpec


class FeatureTokenizer(Tokenizer):
    """Each number of an observation is a token of its own type.

    Token i has the one feature ``observation[i]`` and the type ``feature_i``. The type
    is what tells the numbers apart, so a policy without a type embedding sees a bag
    of numbers. There is no token of the observer.

    Args:
        observer: whose observations are read.
    """

    def __init__(self, observer: Observer) -> None:
        names = tuple(f"feature_{i}" for i in range(observer.size))
        spec = TokenSpec(observer.size, 1, names, has_self=False, positions=())
        super().__init__(observer, spec, range(observer.size))

    def __call__(self, observations: Tensor) -> Tokens:
        """Give each number a row of its own."""
        return self.tokens(observations[..., None])
