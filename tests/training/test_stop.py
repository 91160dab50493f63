import os
import signal
import threading
import time

import pytest
import torch

from effasr.distributed.process_group import DistributedContext
from effasr.training.fault_tolerance.stop import SIGNALS, StopInterrupt, listening

WORLD = DistributedContext(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("number", SIGNALS)
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


def test_a_phase_without_steps_ends_at_once_and_not_after_it():
    with listening() as request:
        assert request.gather(WORLD, lambda: 3) == [3]
        began = time.monotonic()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(StopInterrupt), request.interrupting(WORLD):
            time.sleep(20)
        assert time.monotonic() - began < 1
        with pytest.raises(StopInterrupt):
            request.gather(WORLD, lambda: 3)


def test_a_phase_ends_when_another_rank_is_asked_to_stop():
    store = torch.distributed.HashStore()
    world = DistributedContext(0, 2, torch.device("cpu"), store=store)
    with listening() as request:
        threading.Timer(0.5, store.set, ("stop", "")).start()
        with pytest.raises(StopInterrupt), request.interrupting(world):
            time.sleep(20)


def test_nohup_keeps_ignoring_the_hangup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not request
    finally:
        signal.signal(signal.SIGHUP, before)


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
