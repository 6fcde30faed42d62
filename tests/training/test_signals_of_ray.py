"""SIGTERM while Ray starts, which installs a handler of its own."""

import signal
import sys

import pytest

from marl_pool.training.signals import Terminated, exit_status, keep_sigterm


def test_rays_handler_ends_the_run_as_any_sigterm():
    with pytest.raises(Terminated) as caught, keep_sigterm():
        sys.exit(signal.SIGTERM)  # as ray._private.worker.sigterm_handler does
    assert exit_status(caught.value) == 143


def test_another_exit_stays_what_it_is():
    with pytest.raises(SystemExit) as caught, keep_sigterm():
        sys.exit(3)
    assert caught.value.code == 3
