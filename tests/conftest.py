"""Settings of all tests."""

import torch
from hypothesis import settings

# A shared machine may take its time: no test fails for being slow.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Threads that wait for each other on a busy machine cost more than they gain here.
torch.set_num_threads(1)
