"""SpaceNetwork: from a batch of another library's observations to vectors."""

from typing import Any

from gymnasium import spaces
from torch import Tensor, cat, nn

from marl_pool.compiled import compile
from marl_pool.kernels.functional import Activation
from marl_pool.networks.set_network import SetNetwork
from marl_pool.observations.lists import element_space
from marl_pool.observations.make import make_view, split_action_mask, validate_space
from marl_pool.observations.parts import summary_of
from marl_pool.observations.view import TokenOptions
from marl_pool.options.construction import check_constructor, with_name
from marl_pool.options.signatures import ANY_OTHER, options_of, unknown_key
from marl_pool.options.types import (
    Part,
    PositiveFloat,
    PositiveInt,
    Probability,
    SizeOrZero,
)
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError


class SpaceNetwork(nn.Module):
    """A set network on observations of any Gymnasium space that `make_view` takes.

    The compiled kernel computes what it can; see `marl_pool.compile`.

    Shapes: an observation of the space, whose arrays are tensors ``(*B, …)``, to
    ``(*B, dim_out)``. An ``action_mask`` beside the observation is not a token.

    Args:
        space: of a single observation.
        pooling: a name, or ``{"name": …, **options}``; a head without memory.
        encoder: a name, or ``{"name": …, **options}``.
        dim: the encoder's option ``dim``, the width of its vectors; None for its
            default.
        num_layers: the encoder's option; None for its default.
        num_heads: the encoder's option; None for its default.
        type_embedding: width of the learned type embedding; 0 for none.
        input_activation: applied to the projected tokens; None for none.
        init_std: standard deviation of the initial weights.
        dropout: probability in the encoder while training, in [0, 1).
        token_dropout: probability, while training, that a token is hidden, in [0, 1).
        **options: options of `TokenOptions`, such as ``presence=0``.

    Attributes:
        dim_out: width of the result.

    Raises:
        InputError: a space that cannot become tokens, an unknown name, a wrong option,
            or a head with a memory.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        *,
        pooling: Part = "ada",
        encoder: Part = "transformer",
        dim: PositiveInt | None = None,
        num_layers: PositiveInt | None = None,
        num_heads: PositiveInt | None = None,
        type_embedding: SizeOrZero = 4,
        input_activation: Activation | None = "gelu",
        init_std: PositiveFloat = 0.2,
        dropout: Probability = 0.0,
        token_dropout: Probability = 0.0,
        **options: Any,
    ) -> None:
        super().__init__()
        accepted = options_of(TokenOptions)
        for key in options:
            if key not in accepted:
                parameters = options_of(SpaceNetwork, {"space", ANY_OTHER})
                raise unknown_key(key, {**parameters, **accepted})
        if _has_lists(space):
            raise InputError(
                "observation space: expected arrays of fixed sizes, such as those of "
                f"tokenize_env(env, max_tokens=…), got {space}"
            )
        validate_space(space, "observation space")
        observed, _ = split_action_mask(space)
        self.view = make_view(observed, TokenOptions(**options))
        sizes = {"dim": dim, "num_layers": num_layers, "num_heads": num_heads}
        self.network = compile(
            SetNetwork(
                self.view.spec,
                encoder=with_name(encoder)
                | {k: v for k, v in sizes.items() if v is not None},
                pooling=pooling,
                type_embedding=type_embedding,
                input_activation=input_activation,
                init_std=init_std,
                dropout=dropout,
                token_dropout=token_dropout,
            )
        )
        if self.network.memory_head is not None:
            raise InputError(
                "pooling: expected a head without memory, got "
                f"{with_name(pooling)['name']!r}"
            )
        self.dim_out = self.network.dim_out

    def tokens(self, observation: Any) -> Tokens:
        """Convert a batch of observations ``(*B, …)`` to tokens, without the mask.

        A Dict of tokens may hold any number of them.

        Raises:
            InputError: an array of another shape than the space has.
        """
        values = self.view.read(observation)
        for name, part in self.view.parts.items():
            if not isinstance(values[name], Tensor):
                raise InputError(
                    f"{part.label}expected observations of shape {part.shape}, as in "
                    f"the space, got {summary_of(values[name])}"
                )
            shape, count = tuple(values[name].shape), len(part.shape)
            # Only the number of tokens may differ from the space.
            is_free = self.view.takes_any_number and name in self.view.sets
            fixed = part.shape[1:] if is_free else part.shape
            if len(shape) < count or shape[len(shape) - len(fixed) :] != fixed:
                raise InputError(
                    f"{part.label}expected observations of shape {part.shape}, as in "
                    f"the space, after the dimensions of the batch, got {shape}"
                )
        return self.view.tokens(values)

    def forward(self, observation: Any) -> Tensor:
        """Summarize a batch of observations ``(*B, …)`` in ``(*B, dim_out)``."""
        tokens = self.tokens(observation)
        pooled: Tensor = self.network(tokens.flatten_batch())
        return pooled.unflatten(0, tokens.batch_shape)


check_constructor(SpaceNetwork, "set_network")


def join_rows(mask: Any, space: spaces.Space[Any]) -> Tensor:
    """Return the action masks of a batch ``(*B, L)`` bool, one row for all choices.

    Args:
        mask: tensors of batch ``(*B,)``.
        space: of a single mask: a vector, a matrix or a Tuple of vectors.
    """
    if isinstance(space, spaces.Tuple):
        return cat([*mask], -1).bool()
    allowed: Tensor = mask.bool()
    return allowed.flatten(-2) if len(space.shape or ()) == 2 else allowed


def _has_lists(space: spaces.Space[Any]) -> bool:
    match space:
        case spaces.Dict():
            return any(map(_has_lists, space.values()))
        case spaces.Tuple():
            return any(map(_has_lists, space.spaces))
    return element_space(space) is not None
