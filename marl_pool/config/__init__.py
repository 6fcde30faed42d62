"""Configurations: composed, and checked against the constructors' signatures."""

from marl_pool.config.batch import fit_batch as fit_batch
from marl_pool.config.checks import check as check
from marl_pool.config.checks import check_plain as check_plain
from marl_pool.config.compose import assign as assign
from marl_pool.config.compose import compose as compose
from marl_pool.config.compose import compose_only as compose_only
from marl_pool.config.compose import naming_files as naming_files
from marl_pool.config.describe import commented as commented
from marl_pool.config.grid import STUDIES as STUDIES
from marl_pool.config.grid import plan_grid as plan_grid
from marl_pool.config.grid import plan_search as plan_search
from marl_pool.config.grid import plan_space as plan_space
from marl_pool.config.grid import plan_sweep as plan_sweep
from marl_pool.config.option_files import files_of as files_of
from marl_pool.config.sections import registry as registry
from marl_pool.config.verbs import VERBS as VERBS
from marl_pool.options.overrides import parse as parse
