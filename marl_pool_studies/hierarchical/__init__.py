"""Hierarchical transformer (Nair and Lieck): tokens merge and unmerge in pairs.

- `Reconstruction`, section 4.2 and Figure 4: ``marl-pool sweep --verb fit
  experiment=merging_policies data_dir=DIR``, then ``python scripts/merging_study.py
  SWEEP --out FILE.png``. Figure 4, right, is in each run's ``pictures/``.
- `MergedClassification`, section 4.1: ``marl-pool fit task=merged_classification
  data_dir=DIR``.

Its encoder for policies is `marl_pool.encoders.merging`; docs/hierarchical.md
lists the parts that are not implemented.
"""
