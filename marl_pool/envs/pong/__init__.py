"""Atari Pong with screen patches as tokens."""
