"""AdaPool (Brothers, 2025, https://arxiv.org/abs/2506.09215): studies and theory.

- `KnnCentroid`, Tables 2 to 8 and Figure 4: ``marl-pool sweep --verb fit
  experiment=adapool/figure4``, then ``python scripts/knn_study.py SWEEP --out
  FILE.png``.
- `diagnosis`, Theorem 3.12 on trained policies: ``marl-pool diagnose RUN``.
- `ImageClassification`, section 4.5: ``marl-pool fit task=images data_dir=DIR``, and
  ``python scripts/fit_table.py SWEEP`` for a sweep of it.
"""
