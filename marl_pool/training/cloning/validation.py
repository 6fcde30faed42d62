"""Checks of a cloning configuration across its sections."""

from marl_pool.perturbations.base import validate_no_ramp
from marl_pool.tokens import TokenSpec
from marl_pool.training.cloning.sampler import Augmentation
from marl_pool.training.cloning.settings import CloneConfig, CloneSettings
from marl_pool.utils.errors import InputError


def check_fit_together(config: CloneConfig) -> None:
    """Validate what no single section can check.

    Raises:
        InputError: rounds beyond the last batch, no teacher where one is needed, or a
            perturbation that hides all tokens.
    """
    settings, total = config.clone, config.total_batches
    last = settings.round_start(settings.rounds)
    if total <= last:
        raise InputError(
            f"total_batches: expected more than {last}, where the last of "
            f"clone.rounds = {settings.rounds} begins, got {total}"
        )
    if config.teacher is None and (config.trajectories is None or settings.rounds):
        raise InputError(
            "teacher: expected a teacher with trajectories=null or clone.rounds above "
            "0, got null"
        )
    perturbation = config.perturbation
    name = perturbation["name"]
    if name == "none" and settings.severities is not None:
        raise InputError(
            f"clone.severities: expected null without a perturbation, "
            f"got {list(settings.severities)}"
        )
    validate_no_ramp(perturbation, "samples are learned from in any order")
    severity = perturbation.get("severity", 0.0)
    largest = severity[-1] if isinstance(severity, list) else severity
    if isinstance(severity, list) and settings.severities is not None:
        raise InputError(
            "perturbation.severity: expected a number where clone.severities is given, "
            f"got {severity}"
        )
    if name == "occlude" and largest >= 1 and not settings.severities:
        raise InputError(
            "perturbation.severity: expected a fraction of hidden tokens in [0, 1), "
            f"got {largest:g}"
        )


def logits_option(settings: CloneSettings) -> str:
    """Return the option that needs the teacher's logits, and the value without them."""
    if settings.soft:
        return "clone.soft: expected false"
    if settings.margin_weighting is not None:
        return "clone.margin_weighting: expected null"
    return "clone.expected_regret: expected 0"


def make_augmentation(config: CloneConfig, spec: TokenSpec) -> Augmentation:
    """Build the augmentation of training samples."""
    perturbation, settings = config.perturbation, config.clone
    return Augmentation(
        spec,
        None if perturbation["name"] == "none" else perturbation,
        settings.severities,
        settings.prev_action_noise,
        settings.prev_action_dropout,
        config.seed,
    )
