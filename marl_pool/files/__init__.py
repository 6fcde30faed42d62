"""Durable files: atomic writes, manifests, bounded reads."""
