"""Perturbations of the tokens that a policy observes, and of its actions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from marl_pool.options.construction import build
from marl_pool.options.plugins import Registry
from marl_pool.utils.errors import InputError, UnfitTokensError
from marl_pool.utils.lazy import lazy_exports

if TYPE_CHECKING:
    from marl_pool.perturbations.actions import ActionNoise as ActionNoise
    from marl_pool.perturbations.actions import ActionPerturbation as ActionPerturbation
    from marl_pool.perturbations.actions import DropActions as DropActions
    from marl_pool.perturbations.base import Perturbation as Perturbation
    from marl_pool.perturbations.base import SampledPerturbation as SampledPerturbation
    from marl_pool.perturbations.base import TokenShare as TokenShare
    from marl_pool.perturbations.membership import Duplicate as Duplicate
    from marl_pool.perturbations.membership import Inject as Inject
    from marl_pool.perturbations.membership import Occlude as Occlude
    from marl_pool.perturbations.order import Rewire as Rewire
    from marl_pool.perturbations.order import Shuffle as Shuffle
    from marl_pool.perturbations.readings import Bias as Bias
    from marl_pool.perturbations.readings import Confuse as Confuse
    from marl_pool.perturbations.readings import Delay as Delay
    from marl_pool.perturbations.readings import Freeze as Freeze
    from marl_pool.perturbations.readings import Jitter as Jitter
    from marl_pool.perturbations.readings import Scale as Scale
    from marl_pool.tokens import TokenSpec

PERTURBATIONS = Registry(
    "perturbation",
    {
        "freeze": "marl_pool.perturbations.readings:Freeze",
        "delay": "marl_pool.perturbations.readings:Delay",
        "bias": "marl_pool.perturbations.readings:Bias",
        "scale": "marl_pool.perturbations.readings:Scale",
        "jitter": "marl_pool.perturbations.readings:Jitter",
        "rewire": "marl_pool.perturbations.order:Rewire",
        "confuse": "marl_pool.perturbations.readings:Confuse",
        "occlude": "marl_pool.perturbations.membership:Occlude",
        "duplicate": "marl_pool.perturbations.membership:Duplicate",
        "inject": "marl_pool.perturbations.membership:Inject",
        "shuffle": "marl_pool.perturbations.order:Shuffle",
        "action_noise": "marl_pool.perturbations.actions:ActionNoise",
        "drop_actions": "marl_pool.perturbations.actions:DropActions",
    },
)
"""In the order in which `marl-pool play` chains them; shuffle moves added tokens."""

CONTEXT = (
    "has_self",
    "type_names",
    "signal_types",
    "dtype",
    "num_features",
    "positions",
    "num_frames",
    "markers",
)
"""Attributes of `TokenSpec` that are passed to constructors that accept them."""


def perturbation_names() -> list[str]:
    """Return the names of the registered perturbations."""
    return sorted(PERTURBATIONS)


def make_perturbation(
    name: str, *, specs: Mapping[str, "TokenSpec"] | None = None, **options: Any
) -> "Perturbation":
    """Build a perturbation.

    Args:
        name: one of `perturbation_names`, or ``package.module:Class``.
        specs: of the perturbed tokens of each group of agents. Where the groups differ,
            `Perturbation.for_group` returns the perturbation of each, with its tokens'
            attributes in `CONTEXT`.
        **options: of its constructor; every perturbation takes ``severity``, in [0, 1].

    Raises:
        InputError: an unknown name or a wrong option.
        UnfitTokensError: options that do not fit the tokens of a perturbed group.
    """
    from marl_pool.perturbations.base import Perturbation, validate_constructed

    def construct(context: Mapping[str, Any]) -> Perturbation:
        perturbation: Perturbation = build(
            name, PERTURBATIONS, "perturbation", Perturbation, options, context
        )
        validate_constructed(perturbation)
        return perturbation

    if not isinstance(specs, Mapping | None):
        raise InputError(
            "specs: expected a mapping of groups to TokenSpec, got "
            f"{type(specs).__name__}"
        )
    # Groups that the option leaves out need not fit; the environment checks its names.
    groups = options.get("groups")
    covered = {
        group: spec
        for group, spec in (specs or {}).items()
        if not isinstance(groups, list) or group in groups
    }
    built: dict[tuple[Any, ...], Perturbation] = {}
    by_group: dict[str, Perturbation] = {}
    for group, spec in (covered or specs or {}).items():
        values = tuple(getattr(spec, key) for key in CONTEXT)
        if values not in built:
            try:
                built[values] = construct(dict(zip(CONTEXT, values, strict=True)))
            except UnfitTokensError as error:
                if len(covered) < 2:
                    raise
                raise UnfitTokensError(f"{error}, in group {group!r}") from error
        by_group[group] = built[values]
    if not by_group:
        return construct({})
    perturbation = next(iter(by_group.values()))
    perturbation.made_for = frozenset(by_group)
    perturbation.by_group = {
        group: fitted
        for group, fitted in by_group.items()
        if fitted is not perturbation
    }
    return perturbation


__getattr__, __dir__ = lazy_exports(__name__)
