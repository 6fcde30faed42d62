"""Helpers without knowledge of tokens or policies: errors, types, names, files."""
