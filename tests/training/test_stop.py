import os
import signal
import threading

import pytest

from effasr.training.fault_tolerance.stop import listening


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_becomes_a_request(number):
    before = signal.getsignal(number)
    with listening() as request:
        assert not request
        os.kill(os.getpid(), number)
        assert request
        assert request.received is number
    assert signal.getsignal(number) is before


def test_the_second_interrupt_aborts_at_once():
    with listening() as request:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert request


def test_an_interrupt_after_sigterm_is_still_the_first():
    with listening() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert request.received is signal.SIGINT


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
def test_a_data_worker_ends_on_sigterm_and_ignores_the_interrupt(number, code):
    with listening() as request:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), number)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == code
        assert not request


def test_outside_the_main_thread_signals_are_left_alone():
    seen = []

    def listen():
        with listening() as request:
            seen.append((bool(request), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert seen == [(False, before)]
