"""The library's Python entry points: train, evaluate, perturb."""
