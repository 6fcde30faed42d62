"""Folds of examples for training and validation, and seeds derived from names."""

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.training.supervised.settings import FitSettings
from marl_pool.utils.errors import InputError


class Fold(NamedTuple):
    """Row numbers ``(n,)`` and ``(m,)`` of a fold's examples, disjoint."""

    train: Tensor
    validation: Tensor


def fold_rows(count: int, number: int, seed: int, settings: FitSettings) -> Fold:
    """Split ``count`` examples for the fold ``number``.

    All folds share one permutation, which depends on ``seed`` alone, so each example
    is in exactly one validation set. ``number`` counts from 0.

    Raises:
        InputError: fewer examples than folds, or than a batch.
    """
    if settings.folds > count:
        raise InputError(
            f"fit.folds: expected at most {count}, the number of examples, "
            f"got {settings.folds}"
        )
    shuffled = torch.randperm(count, generator=generator_of(seed, "folds"))
    # One fold has a fraction for validation, several have a part each.
    if settings.folds == 1:
        size = max(1, round(count * settings.validation))
        validation, train = shuffled[:size], shuffled[size:]
    else:
        parts = shuffled.tensor_split(settings.folds)
        validation = parts[number]
        train = torch.cat([*parts[:number], *parts[number + 1 :]])
    # Neither part may be empty, and one batch must fit.
    if not len(train):
        raise InputError(
            f"fit.validation: expected a fraction that leaves some of the {count} "
            f"examples for training, got {settings.validation}"
        )
    if not len(validation) or len(train) < settings.batch_size:
        raise InputError(
            f"fit.batch_size: expected at most {len(train)}, the training examples of "
            f"a fold, got {settings.batch_size}"
        )
    return Fold(train, validation[: settings.validation_examples])


def network_seed(seed: int, number: int) -> int:
    """Return the seed of a fold's initial weights."""
    return number_of(seed, "network", number)


def generator_of(seed: int, *names: object) -> torch.Generator:
    """Build a generator that depends only on the seed and the names."""
    return torch.Generator().manual_seed(number_of(seed, *names))


def number_of(seed: int, *names: object) -> int:
    """Hash the seed and the names into a seed for torch."""
    # torch's CPU generator uses only the low 32 bits of its seed: hash into those.
    return zlib.crc32(" ".join(map(str, (*names, seed))).encode())
