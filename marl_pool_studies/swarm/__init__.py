"""SWARM (Vollgraf, 2019, https://arxiv.org/abs/1906.09400): supervised studies.

- `Clustering`, section 4.1, Table 2 and Figures 2 to 5: ``marl-pool sweep --verb fit
  experiment=swarm/clustering``, then ``python scripts/clustering_study.py SWEEP --out
  FILE.png``. Figures 3 to 5 are in each run's ``pictures/``.
- `MixtureLikelihood`, section 4.2 and Table 3: ``marl-pool fit task=mixture``.
- `ImageGeneration`, section 4.3 and Figure 6: ``marl-pool fit task=generation
  data_dir=DIR``.
"""
