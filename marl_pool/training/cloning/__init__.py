"""Behavior cloning and DAgger: train a policy to imitate a teacher's actions."""

from marl_pool.options.plugins import Registry

TEACHERS = Registry[str]("teacher", {})
"""Teachers that are not policies, by short name."""
