"""Attention, LSTM sequences and layers batched over a population."""
