"""The hierarchical transformer: tokens merge, and are taken apart again.

Source: Nair and Lieck, *Hierarchical Transformers*. Its encoder for policies is
`marl_pool.encoders.learned_merging`; docs/hierarchical.md says what is not built.
"""
