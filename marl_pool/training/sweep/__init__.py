"""Sweeps: the trials of a grid, scheduled by Ray Tune."""
