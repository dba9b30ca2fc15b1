import os
import signal
import threading

import pytest

from cumulant_jax.training import Interrupted
from cumulant_jax.training.signals import StopRequest


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_handlers_are_put_back(signum):
    before = signal.getsignal(signum)
    with StopRequest() as stop:
        assert stop.signum is None
        assert signal.getsignal(signum) != before
        os.kill(os.getpid(), signum)
        assert stop.signum == signum
    assert signal.getsignal(signum) == before


def test_outside_the_main_thread_nothing_is_caught():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with StopRequest():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_exit_codes_are_those_of_shells():
    assert Interrupted(signal.SIGINT, "").exit_code == 130
    assert Interrupted(signal.SIGTERM, "").exit_code == 143
