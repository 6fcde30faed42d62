"""Pooling heads and encoders inside other libraries, each an optional import."""
