"""Critics, which estimate returns in training and are not saved with the policy."""

from marl_pool.options.plugins import Registry

CRITICS = Registry(
    "critic",
    {
        "own": "marl_pool.critics.base:OwnCritic",
        "set": "marl_pool.critics.team:TeamCritic",
        "state": "marl_pool.critics.state:StateCritic",
    },
)
"""Critics of PPO, by short name."""
