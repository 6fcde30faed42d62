"""Supervised tasks built as a run builds them, with their options checked."""

from typing import Any

from marl_pool.options.construction import build
from marl_pool.training.supervised import TASKS
from marl_pool.training.supervised.task import Task

PARTS = ("encoder", "pooling", "dropout", "init_std", "data_dir", "download")


def build_task(name: str, **options: Any) -> Any:
    """Build a task; parts and settings of the run may be among the options."""
    context = {key: options.pop(key) for key in PARTS if key in options}
    return build(name, TASKS, "task", Task, options, context)
