"""The rows of the benchmark, a kind a file."""
