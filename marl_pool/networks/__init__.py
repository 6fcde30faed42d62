"""Tokens to one vector: embedding, encoder, pooling."""
