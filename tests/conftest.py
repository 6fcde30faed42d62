"""Settings of all tests."""

from hypothesis import settings

# A shared machine may take its time: no test fails for being slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
