"""Training: PPO on RLlib. Nothing here loads until it is asked for."""
