"""Sweeps: the runs of a grid or a search, several at a time on ray."""
