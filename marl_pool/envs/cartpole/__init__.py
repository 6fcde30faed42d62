"""Cart-pole swing-up."""
