"""Ant, in MuJoCo and in PyBullet."""
