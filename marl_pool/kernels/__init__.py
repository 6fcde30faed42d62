"""Fast layers: attention, LSTM sequences, and layers batched over a population."""
