"""The emulation that stands in for a GPU must show what a GPU would get wrong."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.csrc.conftest import EMULATED

KERNEL = """
__global__ void reverse(int* values) {
  __shared__ int shared[64];
  shared[threadIdx.x] = values[threadIdx.x];
  BARRIER
  values[threadIdx.x] = shared[63 - threadIdx.x];
}
extern "C" void run(int* values) {
  cudaLaunchConfig_t config = {};
  config.blockDim = dim3(64);
  cudaLaunchKernelEx(&config, reverse, values);
}
"""
CALL = """
import ctypes, sys
values = (ctypes.c_int * 64)(*range(1, 65))
ctypes.CDLL(sys.argv[1]).run(values)
print(list(values) == list(range(64, 0, -1)))
"""


@pytest.mark.parametrize(
    ("barrier", "outcome"),
    [
        ("__syncthreads();", "True"),
        ("", "False"),
        ("if (threadIdx.x != 5) { __syncthreads(); __syncthreads(); } else __syncthreads();", ""),
        ("if (threadIdx.x != 5) { __shfl_up_sync(0xffffffffu, 1, 1); } __syncthreads();", "hangs"),
    ],
    ids=["right", "no_barrier", "a_thread_leaves", "a_lane_missing"],
)
def test_shows_a_barrier_too_few(
    compile_cpp: Callable[..., Path], tmp_path: Path, barrier: str, outcome: str
) -> None:
    source = tmp_path / "reverse.cu"
    source.write_text(KERNEL.replace("BARRIER", barrier), encoding="utf-8")
    library = compile_cpp("reverse", "-O1", *EMULATED, str(source))
    command = [sys.executable, "-c", CALL, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if outcome == "hangs":
        assert done.returncode != 0
        assert "wait for others that never come" in done.stderr
    elif outcome:
        assert done.stdout.split() == [outcome], done.stderr
    else:
        # As on a GPU, a thread that has ended is waited for no more.
        assert done.returncode == 0, done.stderr


def test_strips_are_wider_than_a_block_can_be(libraries: dict[str, ctypes.CDLL]) -> None:
    """So that the strips of the other tests are those of transcripts of 512 labels and more."""
    import torch

    from effasr_kernels.transducer_loss.lattice import occupancies
    from tests.csrc.native import Implementation, random_planes

    blank, label = random_planes(6, 600)
    ((total, *_),) = Implementation(libraries["cuda"], "cuda").transducer([(blank, label)])
    expected = occupancies(blank, label[:, :-1])[0]
    torch.testing.assert_close(total, expected, rtol=0, atol=3e-6)
