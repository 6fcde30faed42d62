"""The hierarchical transformer: tokens merge, and are taken apart again.

Source: Nair and Lieck, *Hierarchical Transformers*. Its encoder for policies is
`marl_pool.encoders.learned_merging`. Of the paper's appendix and section 3.2 are not
built: the Sinkhorn distance between token populations, mixtures of merging networks,
its use as a U-Net or for masked modelling, and sampling from a Gaussian mixture.
"""
