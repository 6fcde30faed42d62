"""Data of the supervised studies: made from a seed, or read from a folder."""
