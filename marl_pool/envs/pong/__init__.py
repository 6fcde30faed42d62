"""Atari Pong on image patches."""
