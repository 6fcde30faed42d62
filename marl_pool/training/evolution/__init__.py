"""Evolution strategies: search for policies by the returns of whole populations."""

STRATEGIES: dict[str, str] = {
    "cma": "marl_pool.training.evolution.cma_es:CMAES",
    "pgpe": "marl_pool.training.evolution.pgpe:PGPE",
}
"""Search strategies by short name."""
