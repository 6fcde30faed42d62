"""PPO on RLlib's new API stack, with a runner for batched environments."""

from marl_pool.training.ppo.train import train

__all__ = ["train"]
