"""AttentionNeuron: published weights, analyses and tables."""
