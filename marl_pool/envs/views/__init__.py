"""PettingZoo and Gymnasium views of one environment."""
