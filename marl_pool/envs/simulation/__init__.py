"""Batches of environments that run in simulators, one process or several."""
