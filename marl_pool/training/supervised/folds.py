"""Splitting examples into folds for training and validation."""

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from marl_pool.training.supervised.settings import FitSettings
from marl_pool.utils.errors import InputError


class Fold(NamedTuple):
    """The row numbers of one fold.

    Attributes:
        train: ``(n,)`` to learn from.
        validation: ``(m,)`` none of which are in ``train``.
    """

    train: Tensor
    validation: Tensor


def fold_rows(count: int, number: int, seed: int, settings: FitSettings) -> Fold:
    """Split ``count`` examples for the fold ``number``.

    All folds share one permutation, so each example validates exactly one of them.

    Args:
        count: of the examples.
        number: of the fold, from 0.
        seed: of the permutation.
        settings: how many folds, and what measures them.

    Raises:
        InputError: fewer examples than folds, or than a batch.
    """
    if settings.folds > count:
        raise InputError(
            f"fit.folds: expected at most {count}, the examples there are, "
            f"got {settings.folds}"
        )
    shuffled = torch.randperm(count, generator=generator_of(seed, "folds"))
    if settings.folds == 1:
        size = max(1, round(count * settings.validation))
        validation, train = shuffled[:size], shuffled[size:]
    else:
        parts = shuffled.tensor_split(settings.folds)
        validation = parts[number]
        train = torch.cat([*parts[:number], *parts[number + 1 :]])
    if not len(train):
        raise InputError(
            f"fit.validation: expected a share that leaves some of the {count} "
            f"examples to learn from, got {settings.validation}"
        )
    if not len(validation) or len(train) < settings.batch_size:
        raise InputError(
            f"fit.batch_size: expected at most {len(train)}, the examples that a fold "
            f"learns from, got {settings.batch_size}"
        )
    return Fold(train, validation[: settings.validation_examples])


def network_seed(seed: int, number: int) -> int:
    """Return the seed of a fold's initial weights."""
    return number_of(seed, "network", number)


def generator_of(seed: int, *names: object) -> torch.Generator:
    """Build a generator that depends on the seed and the names alone."""
    return torch.Generator().manual_seed(number_of(seed, *names))


def number_of(seed: int, *names: object) -> int:
    """Hash the seed and the names into a seed for torch."""
    # torch's CPU generator heeds the low 32 bits of its seed only: hash into those.
    return zlib.crc32(" ".join(map(str, (*names, seed))).encode())
