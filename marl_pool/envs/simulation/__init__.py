"""Batches of environments around third-party simulators."""
