"""Measurements of a pooling head: signal, error bounds, attention weights."""
