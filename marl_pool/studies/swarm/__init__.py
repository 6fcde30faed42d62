"""SWARM: clustering, mixtures and image generation."""
