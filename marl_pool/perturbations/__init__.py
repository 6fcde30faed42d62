"""Perturbations of the tokens that a policy observes, and of its actions."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from marl_pool.options.construction import build
from marl_pool.options.plugins import Registry
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
        "action_noise": "marl_pool.perturbations.actions:ActionNoise",
        "bias": "marl_pool.perturbations.readings:Bias",
        "confuse": "marl_pool.perturbations.readings:Confuse",
        "delay": "marl_pool.perturbations.readings:Delay",
        "drop_actions": "marl_pool.perturbations.actions:DropActions",
        "duplicate": "marl_pool.perturbations.membership:Duplicate",
        "freeze": "marl_pool.perturbations.readings:Freeze",
        "inject": "marl_pool.perturbations.membership:Inject",
        "jitter": "marl_pool.perturbations.readings:Jitter",
        "occlude": "marl_pool.perturbations.membership:Occlude",
        "rewire": "marl_pool.perturbations.order:Rewire",
        "scale": "marl_pool.perturbations.readings:Scale",
        "shuffle": "marl_pool.perturbations.order:Shuffle",
    },
)

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
    name: str, *, specs: Iterable["TokenSpec"] = (), **options: Any
) -> "Perturbation":
    """Build a perturbation.

    Args:
        name: one of `perturbation_names`, or ``package.module:Class``.
        specs: of the perturbed tokens, one for each group of agents. The attributes in
            `CONTEXT` are taken from them where they agree.
        **options: of its constructor; every perturbation takes ``severity``, in [0, 1].

    Raises:
        InputError: an unknown name or a wrong option.
    """
    from marl_pool.perturbations.base import Perturbation, validate_constructed

    token_specs = list(specs)
    context = {
        key: getattr(token_specs[0], key)
        for key in CONTEXT
        if len({getattr(spec, key) for spec in token_specs}) == 1
    }
    perturbation: Perturbation = build(
        name, PERTURBATIONS, "perturbation", Perturbation, options, context
    )
    validate_constructed(perturbation)
    return perturbation


__getattr__, __dir__ = lazy_exports(__name__)
