"""AttentionNeuron: published weights, analyses and tables.

Tang and Ha, The Sensory Neuron as a Transformer: Permutation-Invariant Neural Networks
for Reinforcement Learning (2021, https://arxiv.org/abs/2109.02869).
``marl-pool import-weights attention-neuron`` reads the authors' weights, and
``marl-pool evaluate RUN suite=attention_neuron`` reproduces Tables 2 to 6 and Figures
4, 6 and 8.
"""
