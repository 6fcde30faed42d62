"""Behaviour cloning and DAgger: train an `Agent` to imitate a teacher's actions."""
