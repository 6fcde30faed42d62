"""SpaceNetwork: from a batch of another library's observations to vectors."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gymnasium import spaces
from torch import Tensor, cat, nn

from marl_pool.kernels.functional import Activation
from marl_pool.networks.set_network import SetNetwork
from marl_pool.observations.make import make_view, split_action_mask
from marl_pool.observations.masks import MASK
from marl_pool.observations.view import TokenOptions
from marl_pool.options.construction import build
from marl_pool.options.signatures import check_argument, options_of
from marl_pool.options.types import PositiveFloat
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

NETWORK = f"{SetNetwork.__module__}:{SetNetwork.__qualname__}"
TOKEN_OPTIONS = tuple(field.name for field in fields(TokenOptions))


class SpaceNetwork(nn.Module):
    """A set network on observations of any Gymnasium space that `make_view` takes.

    Shapes: an observation of the space whose arrays are tensors ``(*B, …)`` to
    ``(*B, dim_out)``. An ``action_mask`` beside the observation is no token.

    Args:
        space: of a single observation.
        pooling: a name, or ``{"name": …, **options}``.
        encoder: a name, or ``{"name": …, **options}``.
        input_activation: as in `TokenPolicy`.
        init_std: as in `TokenPolicy`.
        **options: other options of `SetNetwork`, and of `TokenOptions`, such as
            ``presence``.

    Attributes:
        dim_out: width of the result.
        mask_space: space of the action mask; None without one.

    Raises:
        InputError: a space that cannot become tokens, an unknown name or option, or a
            head with memory, whose state the observation does not hold.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        *,
        pooling: str | Mapping[str, Any] = "ada",
        encoder: str | Mapping[str, Any] = "transformer",
        input_activation: Activation | None = "gelu",
        init_std: PositiveFloat = 0.2,
        **options: Any,
    ) -> None:
        super().__init__()
        of_tokens = {k: options.pop(k) for k in TOKEN_OPTIONS if k in options}
        for key, value in of_tokens.items():
            check_argument(key, value, options_of(TokenOptions)[key].annotation)
        observed, self.mask_space = split_action_mask(space)
        self.view = make_view(observed, TokenOptions(**of_tokens))
        parts = {"pooling": pooling, "encoder": encoder}
        options |= {
            kind: {"name": part} if isinstance(part, str) else part
            for kind, part in parts.items()
        }
        options |= {"input_activation": input_activation, "init_std": init_std}
        self.network: SetNetwork = build(
            NETWORK, {}, "network", SetNetwork, options, {"spec": self.view.spec}
        )
        self.dim_out = self.network.dim_out
        if self.network.memory_head is not None:
            raise InputError(
                "pooling: expected a head without memory, got "
                f"{options['pooling']['name']!r}"
            )

    def tokens(self, observation: Any) -> Tokens:
        """Convert a batch of observations ``(*B, …)`` to tokens."""
        return self.view.tokens(self.view.read(observation))

    def action_mask(self, observation: Any) -> Tensor | None:
        """Return the allowed options ``(*B, L)``, bool, in one row; None for all."""
        if self.mask_space is None:
            return None
        mask = observation[MASK]
        joined = cat([*mask], -1) if isinstance(mask, tuple | list) else mask
        return joined.bool()

    def forward(self, observation: Any) -> Tensor:
        """Summarize a batch of observations ``(*B, …)`` in ``(*B, dim_out)``."""
        tokens = self.tokens(observation)
        pooled: Tensor = self.network(tokens.flatten_batch())
        return pooled.unflatten(0, tokens.batch_shape)
