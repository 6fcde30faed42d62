"""PettingZoo parallel environments with tokens as observations."""
