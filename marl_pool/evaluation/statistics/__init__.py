"""Confidence intervals, paired comparisons and normalized scores."""
