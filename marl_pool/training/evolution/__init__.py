"""Evolution strategies: search for policies by the returns of whole populations."""

from marl_pool.options.plugins import Registry

STRATEGIES = Registry(
    "evolution",
    {
        "cma": "marl_pool.training.evolution.cma_es:CMAES",
        "pgpe": "marl_pool.training.evolution.pgpe:PGPE",
    },
)
"""Search strategies by short name."""
