"""Multi-particle environments, batched: simple_centroid and simple_tag."""
