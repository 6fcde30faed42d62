"""Multi-particle environments, batched: simple_tag, simple_spread and others."""
