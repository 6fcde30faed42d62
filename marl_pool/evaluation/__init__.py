"""Evaluation: robustness, its statistics, diagnosis, videos and reports."""
