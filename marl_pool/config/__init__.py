"""Configurations: composed by Hydra, checked against constructors' signatures."""

from marl_pool.config.checks import check
from marl_pool.config.compose import (
    assign,
    check_composed,
    compose,
    compose_only,
    parse,
)
from marl_pool.config.describe import commented
from marl_pool.config.grid import (
    STUDIES,
    plan_grid,
    plan_search,
    plan_space,
    plan_sweep,
)
from marl_pool.config.sections import VERBS, files_of, registry

__all__ = [
    "STUDIES",
    "VERBS",
    "assign",
    "check",
    "check_composed",
    "commented",
    "compose",
    "compose_only",
    "files_of",
    "parse",
    "plan_grid",
    "plan_search",
    "plan_space",
    "plan_sweep",
    "registry",
]
