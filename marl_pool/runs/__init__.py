"""Folders of runs and sweeps, and their mirrors in object storage."""
