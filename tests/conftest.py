import gc
import os
import shutil
import signal

import pytest
import torch
from filelock import FileLock

from effasr_kernels.shared.cpu import linear as cpu_linear
from tests.support.cpp_build import build, installed

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    # `make gpu` runs tests with what is installed.
    pass
else:
    # On a loaded machine an example may take any time, which is no failure.
    settings.register_profile(
        "any_load", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("any_load")

# `nohup make test` has it ignored, which a training inherits and respects.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = [
    "pytester",
    "tests.support.commands",
    "tests.support.cpu_report",
    "tests.support.small_model",
    "tests.support.suites",
]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave modules and tests, which stay to the end, out of collections of garbage.

    In some tests of training and decoding, these took an eighth of the processor time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small tensors gain nothing from threads, and parallel test processes lose by them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def interruptible():
    """A shell that runs tests in the background has them ignore SIGINT, which some tests send."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def speech_by_loudness():
    """Tests hear noises and tones, in which Silero detects no speech."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("effasr.transcription.inputs.vad.find_spec", lambda name: None)
        yield


@pytest.fixture
def without_onednn(monkeypatch):
    """Eager linear layers round as those of compiled graphs do."""
    monkeypatch.setattr(cpu_linear, "_is_built", lambda: False)


@pytest.fixture(scope="session")
def whisper_checkpoint(tmp_path_factory):
    from tests.interop.whisper import make_whisper

    make_whisper(folder := tmp_path_factory.mktemp("whisper"))
    return folder


@pytest.fixture(scope="session")
def cpp_extension(tmp_path_factory):
    """Where packages lie with the CPU kernels of csrc/, once for all processes of a run of tests.

    An installation builds them a minute before the tests begin: those are taken if no source is
    younger. `tests/ops/test_cpp_extension.py` builds them anew (``extended``).
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cpp_extension"
    with FileLock(f"{folder}.lock"):
        if not (folder / "lib").exists():
            folder.mkdir(exist_ok=True)
            if (library := installed()) is not None:
                (folder / "lib" / "effasr_kernels").mkdir(parents=True)
                shutil.copy(library, folder / "lib" / "effasr_kernels")
            elif shutil.which("g++") is None:
                pytest.skip("no g++ on this machine to compile csrc/ with")
            else:
                build(folder)
    return folder / "lib"
