"""Supervised fits: a `Task`, one trainer, k-fold cross-validation."""
