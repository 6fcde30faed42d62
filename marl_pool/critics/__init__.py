"""Critics, which estimate returns while a policy is trained and are not saved with it."""

from marl_pool.options.plugins import Registry

CRITICS = Registry(
    "critic",
    {
        "own": "marl_pool.critics.base:OwnCritic",
        "set": "marl_pool.critics.team:SetCritic",
        "state": "marl_pool.critics.state:StateCritic",
    },
)
"""Critics of PPO, by short name."""
