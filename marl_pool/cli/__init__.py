"""The ``marl-pool`` command line."""
