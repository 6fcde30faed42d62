"""BoxWorld: a planning task on a grid of keys and locks."""
