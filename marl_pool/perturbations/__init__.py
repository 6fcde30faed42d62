"""Perturbations: what a policy observes, changed on the way."""

from typing import TYPE_CHECKING, Any

from marl_pool.names import build

if TYPE_CHECKING:
    from marl_pool.perturbations.base import Perturbation

PERTURBATIONS: dict[str, str] = {
    "inject": "marl_pool.perturbations.inject:Inject",
    "noise": "marl_pool.perturbations.noise:Noise",
    "occlude": "marl_pool.perturbations.occlude:Occlude",
    "rewire": "marl_pool.perturbations.rewire:Rewire",
    "shuffle": "marl_pool.perturbations.shuffle:Shuffle",
}


def perturbation_names() -> list[str]:
    """The registered perturbations."""
    return sorted(PERTURBATIONS)


def make_perturbation(name: str, **options: Any) -> "Perturbation":
    """Build a perturbation.

    Args:
        name: one of `perturbation_names`, or ``package.module:Class`` of your own.
        **options: of its constructor; all of them take ``severity``, in [0, 1].

    Raises:
        InputError: an unknown name or a wrong option.
    """
    from marl_pool.perturbations.base import Perturbation

    return build(name, PERTURBATIONS, "perturbation", Perturbation, options)
