"""The view of vectors by a tokenizer."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from marl_pool.envs.tokenizers.base import Tokenizer
from marl_pool.observations.parts import Part, PlainSpace
from marl_pool.observations.view import TokenView
from marl_pool.tokens import Tokens
from marl_pool.utils.errors import InputError

NUMBERS = "numbers"
"""Name of the part that holds a vector."""


class TokenizedView(TokenView):
    """Vectors, converted by a tokenizer in one call for the whole batch.

    Args:
        space: of the vectors.
        tokenizer: converts them.
        name: of the tokenizer, for errors.
        number: NumPy dtype in which floats are stored.

    Raises:
        InputError: the tokenizer does not fit the observations.
    """

    def __init__(
        self, space: PlainSpace, tokenizer: Tokenizer, name: str, number: Any
    ) -> None:
        super().__init__(tokenizer.spec, {NUMBERS: Part.of(space, "", number)})
        self.tokenizer = tokenizer
        self.dtype = torch.from_numpy(np.zeros(0, number)).dtype
        self._validate(name)

    @override
    def read(self, observation: Any) -> Mapping[str, Any]:
        return {NUMBERS: observation}

    @override
    def convert(self, parts: Mapping[str, Tensor]) -> Tokens:
        numbers = parts[NUMBERS].to(self.dtype)
        tokens = self.tokenizer(numbers.flatten(0, -2))
        return tokens.map(lambda part: part.unflatten(0, numbers.shape[:-1]))

    def _validate(self, name: str) -> None:
        # Try the tokenizer on zeros, so that a misfit is found before training.
        observer, spec = self.tokenizer.observer, self.spec
        where = f"env.tokenizer: {name} does not fit observations of {observer.size} "
        where += "numbers"
        try:
            zeros = torch.zeros(2, observer.size, device=observer.device)
            tokens = self.tokenizer(zeros)
        except (RuntimeError, LookupError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise InputError(f"{where}: {first}") from error
        # Compare shapes and types with the spec.
        shape = (2, spec.num_tokens)
        for part, tensor, expected, dtype in (
            ("features", tokens.features, (*shape, spec.num_features), None),
            ("types", tokens.types, shape, torch.int64),
            ("padding", tokens.padding, shape, torch.bool),
        ):
            if tensor.shape != expected or dtype not in (None, tensor.dtype):
                raise InputError(
                    f"{where}: expected {part} of shape {expected}"
                    f"{f' and {dtype}' if dtype else ''}, got {tuple(tensor.shape)} "
                    f"and {tensor.dtype}"
                )
        highest = int(tokens.types.max())
        if not 0 <= int(tokens.types.min()) <= highest < spec.num_types:
            raise InputError(
                f"{where}: expected types below {spec.num_types}, got {highest}"
            )
