"""Behaviour cloning: a teacher's answers, learned by an `Agent`."""
