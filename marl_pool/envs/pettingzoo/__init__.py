"""PettingZoo's parallel environments as token environments."""
