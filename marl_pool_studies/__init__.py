"""Studies of five papers on `marl_pool`: tasks, data, figures and published numbers."""
