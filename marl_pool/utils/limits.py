"""Upper bounds of sizes, checked before anything of that size is allocated.

A configuration may come from somebody else. The bounds are far above what any study
needs, so that they refuse mistakes and malice, not experiments.
"""

from collections.abc import Mapping
from typing import Any

from marl_pool.utils.errors import InputError

WIDTH = 16_384
"""Numbers in a vector, hidden units, channels."""
DEPTH = 1024
"""Layers, heads, stacked frames, threads, repeated updates."""
TOKENS = 16_384
"""Tokens, entities, sensor channels; pixels along an edge."""
WORLDS = 1 << 20
"""Environments stepped together, members of a population."""
SAMPLES = 100_000_000
"""Examples of a data set."""
LONGEST = 16_384
"""Entries of a list."""

LIMITS: dict[str, int] = {
    **dict.fromkeys(
        (
            *("channels", "convolutions", "dim", "dim_ff", "dim_out", "fourier_bands"),
            *("head_hidden", "hidden", "key_units", "memory", "message_dim"),
            *("num_codes", "num_features", "num_levels", "num_outputs", "patch_dim"),
            *("patch_convolutions", "position_dim", "query_dim", "readout"),
            *("type_embedding", "units", "value_dim", "width", "action_dim"),
        ),
        WIDTH,
    ),
    **dict.fromkeys(
        (
            *("feedforward_layers", "frames", "iterations", "num_components"),
            *("num_frames", "num_heads", "num_layers", "num_updates", "policy_heads"),
            "threads",
        ),
        DEPTH,
    ),
    **dict.fromkeys(
        (
            *("clusters", "count", "counts", "crop_padding", "distractor_length"),
            *(
                "duplicates",
                "entities",
                "expected_tokens",
                "features",
                "goal_length",
                "k",
                "n",
            ),
            *("noise_channels", "num_agents", "num_distractors", "num_inducing"),
            *("num_noise", "num_obstacles", "num_predators", "num_prey", "num_seeds"),
            *("num_signal", "num_tokens", "num_vectors", "patch", "picture_grid"),
            *("position_features", "positions", "query", "schedule", "size", "steps"),
            *("stride", "token_type", "top_k", "zero_rows", "zero_rows_bottom"),
        ),
        TOKENS,
    ),
    **dict.fromkeys(("num_envs", "population", "episodes"), WORLDS),
    **dict.fromkeys(("num_samples", "num_test"), SAMPLES),
}
"""By option: the largest number that it may be, or that a list in it may hold."""


def check_sizes(where: str, options: Mapping[str, Any]) -> None:
    """Refuse options that would take more memory than anybody means to spend.

    Args:
        where: prefix of the keys, for messages.
        options: keyword arguments. What a mapping in them names is checked where that
            is built.

    Raises:
        InputError: a number above its bound in `LIMITS`, or a list that is too long.
    """
    for key, value in options.items():
        check_size(f"{where}.{key}" if where else key, value)


def check_size(key: str, value: Any) -> None:
    """Refuse one option's value; see `check_sizes`.

    Args:
        key: dotted; its last part is looked up.
        value: a number, text such as ``"1-3-28"``, or a list of these.
    """
    limit = LIMITS.get(key.rpartition(".")[2])
    if isinstance(value, list | tuple):
        if len(value) > LONGEST:
            raise InputError(
                f"{key}: expected a list of at most {LONGEST:,} entries, got "
                f"{len(value):,}"
            )
        for part in value:
            if not isinstance(part, Mapping):
                check_size(key, part)
    elif limit is None or isinstance(value, bool):
        return
    elif isinstance(value, int | float) and value > limit:
        raise InputError(f"{key}: expected at most {limit:,}, got {value:,}")
    elif isinstance(value, str):
        for part in value.split("-"):
            if part.isdecimal() and (len(part) > 9 or int(part) > limit):
                raise InputError(
                    f"{key}: expected numbers of at most {limit:,}, got {value!r:.80}"
                )
