"""Supervised fits: a `Task`, one trainer, k-fold cross-validation."""

from marl_pool.options.plugins import Registry

TASKS = Registry[str]("task", {})
"""Supervised tasks by short name."""
