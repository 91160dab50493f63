import subprocess
import sys

import pytest
import torch

from effasr import ranges


@pytest.fixture(autouse=True)
def _off_again():
    yield
    ranges.disable()


def test_off_it_is_one_shared_context_and_imports_nothing():
    assert ranges.range("forward") is ranges.range("backward")
    code = "import sys; import effasr.ranges; assert not {'nvtx', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_on_every_range_is_shown_under_its_name_with_its_number(monkeypatch):
    nvtx = pytest.importorskip("nvtx")
    visible = []
    annotate = nvtx.annotate
    monkeypatch.setattr(
        nvtx, "annotate", lambda **options: visible.append(options) or annotate(**options)
    )
    ranges.enable("nvtx")
    with ranges.range("forward"), ranges.range("layer", 7):
        pass
    assert visible == [
        {"message": "forward", "domain": "effasr"},
        {"message": "layer", "domain": "effasr", "payload": 7},
    ]


@pytest.mark.parametrize(
    ("installed", "tool", "message"),
    [
        ("0.2.8", None, "nvtx 0.2.8 has no payloads"),
        ("0.2.12", (2023, 4), r"nvtx 0.2.12 loses every range under Nsight Systems 2023\.4"),
        ("0.2.14", (2022, 4), "install nvtx 0.2.11"),
        ("0.2.11", (2023, 4), None),
        ("0.2.14", (2025, 1), None),
        ("0.2.14", None, None),
    ],
)
def test_versions_that_lose_ranges_are_refused(monkeypatch, installed, tool, message):
    pytest.importorskip("nvtx")
    monkeypatch.setattr(ranges, "version", lambda name: installed)
    if message is None:
        ranges.enable("nvtx", tool_version=tool)
        return
    with pytest.raises(RuntimeError, match=message):
        ranges.enable("nvtx", tool_version=tool)
    assert ranges.range("step") is ranges.range("other")


def test_annotations_of_torch_profiler():
    ranges.enable("kineto")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=activities) as profile,
        ranges.range("step", 3),
        ranges.range("forward"),
    ):
        torch.ones(2)
    names = {event.key for event in profile.key_averages()}
    assert {"step", "forward"} <= names


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for torch without CUDA")
def test_torch_without_nvtx_is_an_error_at_once():
    with pytest.raises(RuntimeError, match="NVTX"):
        ranges.enable("torch")
