"""Mirrors of runs and sweeps in object storage."""
