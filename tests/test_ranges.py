import subprocess
import sys

import pytest

from effasr import ranges


@pytest.fixture(autouse=True)
def _off_again():
    yield
    ranges.disable()


def test_off_it_is_one_shared_context_and_imports_nothing() -> None:
    assert ranges.range("forward") is ranges.range("backward")
    code = "import sys; import effasr.ranges; assert not {'nvtx', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_on_every_range_is_shown_under_its_name(monkeypatch) -> None:
    nvtx = pytest.importorskip("nvtx")
    shown = []
    annotate = nvtx.annotate
    monkeypatch.setattr(
        nvtx, "annotate", lambda **options: shown.append(options) or annotate(**options)
    )
    ranges.enable("nvtx")
    with ranges.range("forward"), ranges.range("layer"):
        pass
    assert shown == [
        {"message": "forward", "domain": "effasr"},
        {"message": "layer", "domain": "effasr"},
    ]


def test_torch_without_nvtx_is_an_error_at_once() -> None:
    import torch

    if torch.cuda.is_available():
        ranges.enable("torch")
        with ranges.range("forward"):
            pass
    else:
        with pytest.raises(RuntimeError, match="NVTX"):
            ranges.enable("torch")
