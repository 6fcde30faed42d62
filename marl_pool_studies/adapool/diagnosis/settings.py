"""Settings of `diagnose`; imported without torch."""

from dataclasses import dataclass

from marl_pool.evaluation.settings import EpisodeSettings
from marl_pool.options.types import Episodes, Examples


@dataclass(frozen=True)
class DiagnoseSettings(EpisodeSettings):
    """Measurement of a trained policy's signal loss and relation scores."""

    episodes: Episodes = 64
    """Episodes that the policy plays."""
    max_observations: Examples = 8192
    """Limit for each group of agents; beyond it every n-th step is taken."""
