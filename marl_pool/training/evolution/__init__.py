"""Evolution: agents found by the returns of whole populations, without a gradient."""

STRATEGIES: dict[str, str] = {
    "cma": "marl_pool.training.evolution.cma_es:CMAES",
    "pgpe": "marl_pool.training.evolution.pgpe:PGPE",
}
"""Strategies, which sample populations and learn from their returns."""
