"""Supervised studies: a task, one trainer, k folds."""
