"""Training: PPO on RLlib, evolution, cloning, supervised fits, and sweeps.

Importing this package loads neither torch nor ray.
"""
