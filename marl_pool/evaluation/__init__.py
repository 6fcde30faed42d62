"""Evaluation: robustness, its statistics, videos. Nothing loads until asked for."""
