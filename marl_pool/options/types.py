"""Types of options, and upper bounds of their sizes; it imports no torch.

A configuration may come from somebody else. The bounds are far above what any study
needs, and are checked before memory or hours are spent: they reject mistakes and
malice, not experiments.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from marl_pool.utils.errors import InputError

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Severity = Annotated[
    UnitInterval | tuple[UnitInterval, UnitInterval],
    Field(description="a number in [0, 1], or two: [low, high]"),
]
"""Severity of a perturbation; of two, each episode samples its own between them."""
Probability = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=1 << 63, description="an integer in [0, 2**63)")]
Device = Annotated[
    str,
    Field(pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N"),
]
StorageURL = Annotated[
    str,
    Field(
        pattern=r"^[a-z][a-z0-9+.-]*://[^/@?#\s]*(/[^?#\s]*)?$",
        description="a URL such as s3://bucket/runs, without credentials",
    ),
]
Kernels = Literal["auto", "torch", "native"]
"""Compute narrow set networks by torch, by the compiled kernel, or by what fits."""
LearningRateSchedule = Literal["constant", "linear"]
"""Keep the learning rate, or lower it to zero over the run."""
Counts = Annotated[
    str,
    Field(
        pattern=r"^[0-9]+-[0-9]+-[0-9]+$",
        description="three numbers such as 1-3-28",
    ),
]
"""Numbers of entities of three kinds."""


class Options(dict[str, Any]):
    """Section ``{"name": …, **options}``, whose name chooses a registered class.

    It is passed whole to a function such as `make_batched_env`, which checks it against
    the signature of that class.
    """

    @property
    def name(self) -> str:
        """Name of the class."""
        return self["name"]

    @property
    def arguments(self) -> dict[str, Any]:
        """Options without the name."""
        return {key: value for key, value in self.items() if key != "name"}

    @property
    def or_none(self) -> "Options | None":
        """The section; None if its name is ``none``."""
        return None if self.name == "none" else self


# Bounds

SIZES = (
    "action_dim", "channels", "choices", "clusters", "convolutions", "count", "counts",
    "crop_padding", "dim", "dim_ff", "dim_out", "distractor_length", "duplicates",
    "entities", "expected_tokens", "features", "fourier_bands", "goal_length",
    "head_hidden", "hidden", "k", "key_units", "memory", "message_dim", "n",
    "noise_channels", "num_agents", "num_codes", "num_distractors", "num_features",
    "num_inducing", "num_levels", "num_noise", "num_obstacles", "num_outputs",
    "num_predators", "num_prey", "num_seeds", "num_signal", "num_tokens",
    "num_vectors", "patch", "patch_convolutions", "patch_dim", "picture_grid",
    "position_dim", "position_features", "positions", "query", "query_dim",
    "readout", "schedule", "size", "steps", "stride", "token_type", "top_k",
    "type_embedding", "units", "value_dim", "width", "zero_rows", "zero_rows_bottom",
)  # fmt: skip
"""Options that count tokens, entities, pixels along an edge or numbers in a vector."""
REPEATS = (
    "feedforward_layers", "frames", "iterations", "num_components", "num_frames",
    "num_heads", "num_layers", "num_updates", "policy_heads", "threads",
)  # fmt: skip
"""Options that count layers, heads, stacked frames, threads or repeated updates."""
LIMITS: dict[str, int] = {
    **dict.fromkeys(SIZES, 16_384),
    **dict.fromkeys(REPEATS, 1024),
    **dict.fromkeys(("num_envs", "population", "episodes", "max_steps"), 1 << 20),
    **dict.fromkeys(("repetitions", "max_envs"), 1 << 20),
    **dict.fromkeys(
        ("num_env_runners", "num_learners", "num_workers", "workers"), 1 << 14
    ),
    **dict.fromkeys(("concurrency", "cpus_per_trial"), 1 << 14),
    **dict.fromkeys(("rows", "fps"), 1024),
    **dict.fromkeys(("num_samples", "num_test", "max_observations"), 100_000_000),
    **dict.fromkeys(("batch_size", "minibatch_size"), 100_000_000),
}
"""By option: the largest number that it may be, or that a list in it may hold."""
LONGEST = 16_384
"""Entries of a list."""


def check_sizes(where: str, options: Mapping[str, Any]) -> None:
    """Check each keyword argument with `check_size`."""
    # Options in a mapping among them are checked where that is built.
    for key, value in options.items():
        check_size(f"{where}.{key}" if where else key, value)


def check_size(key: str, value: Any) -> None:
    """Reject a value that would allocate too much memory.

    Args:
        key: dotted; its last part is looked up in `LIMITS`.
        value: a number, text such as ``"1-3-28"``, or a list of these.

    Raises:
        InputError: a number above its bound, or a list that is too long.
    """
    limit = LIMITS.get(key.rpartition(".")[2])
    # Check each entry of a list.
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
            # int() of thousands of digits raises.
            if part.isdecimal() and (len(part) > 9 or int(part) > limit):
                raise InputError(
                    f"{key}: expected numbers of at most {limit:,}, got {value!r:.80}"
                )
