"""Compiled kernel for narrow set transformers; see `marl_pool.kernels.native.call`."""
