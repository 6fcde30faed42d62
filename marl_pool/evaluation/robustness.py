"""How much of its return a policy keeps when what it sees is perturbed."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from marl_pool.envs.base import World
from marl_pool.errors import InputError
from marl_pool.evaluation.results import CLEAN, TRAINED, Result, print_table, write
from marl_pool.evaluation.statistics import paired_drop, summarize
from marl_pool.evaluation.subject import Policies, Subject, cpu_threads, perturb
from marl_pool.names import resolve
from marl_pool.perturbations import PERTURBATIONS
from marl_pool.perturbations.base import Perturbation
from marl_pool.policies.base import Policy
from marl_pool.progress import Progress
from marl_pool.rollout import Moment, Rollout
from marl_pool.tokens import SELF_TYPE

if TYPE_CHECKING:
    from marl_pool.runs import Run


@dataclass(frozen=True)
class Condition:
    """What is done to observations.

    Attributes:
        name: of the perturbation, or "clean".
        options: those that differ from its defaults, severity left out.
        severity: in [0, 1].
        perturbation: None for clean.
    """

    name: str = CLEAN
    options: Mapping[str, Any] = inspect.Parameter.empty
    severity: float = 0.0
    perturbation: Perturbation | None = None
