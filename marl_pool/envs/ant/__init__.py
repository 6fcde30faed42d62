"""Ant in MuJoCo and in PyBullet, with sensor channels as tokens."""
