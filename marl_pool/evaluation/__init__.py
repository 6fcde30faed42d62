"""Evaluation: robustness, its statistics, videos and reports."""
