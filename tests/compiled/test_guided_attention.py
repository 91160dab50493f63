"""`guided_attention` compiled for GPUs that need not be there."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from effasr_kernels.attention.triton import guided
from effasr_kernels.guided_attention import GuidedArguments
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.testing import aot

HEADS = 8
KERNELS = {"attention_forward", "attention_backward_q", "attention_backward_kv"}
"""Those with tensor cores, compiled with their constant ``GUIDED``."""
ALL = KERNELS | {"attention_delta"}

CompiledOk = Callable[..., dict[str, aot.Resources]]


def _launches(
    tokens: Sequence[int] = (9, 0, 40),
    frames: Sequence[int] = (40, 7, 150),
    *,
    width: int = 64,
    dropout: float = 0.1,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (9, 0),
    spare: tuple[int, int] = (15, 3),
    interleaved: bool = True,
) -> list[Launch]:
    """The launches of forward and backward; keys and values may be parts of one product."""
    layout_q = PackedLayout.from_lengths(tokens, rows=sum(tokens) + spare[0])
    layout_k = PackedLayout.from_lengths(frames, rows=sum(frames) + spare[1])
    both = torch.zeros(layout_k.rows, 2, HEADS, width, dtype=dtype)
    k, v = both.unbind(1) if interleaved else both.transpose(0, 1).contiguous()
    arguments = {
        "q": torch.zeros(layout_q.rows, HEADS, width, dtype=dtype),
        "k": k,
        "v": v,
        "layout_q": layout_q,
        "layout_k": layout_k,
        "sigma": 0.3,
        "scale": width**-0.5,
        "dropout": dropout,
        "seed": torch.tensor(1) if dropout else None,
    }
    with recording(capability) as launches:
        results, saved = guided.forward(GuidedArguments(**arguments))
        guided.backward(
            GuidedArguments(**arguments), tuple(map(torch.ones_like, results)), results, saved
        )
    assert all(x.constants["GUIDED"] for x in launches)
    return launches


@pytest.mark.parametrize(
    ("architecture", "width", "dropout"),
    [
        *itertools.product([80, 90], [64, 128], [0.1, 0.0]),
        *[(80, 256, 0.1), (90, 256, 0.1), (100, 64, 0.1), (100, 64, 0.0)],
    ],
)
@pytest.mark.representative(width=64)
def test_compiles_for_every_architecture(
    compiled_ok: CompiledOk, architecture: int, width: int, dropout: float
) -> None:
    capability = architecture // 10, 0
    launches = _launches(width=width, dropout=dropout, capability=capability)
    assert set(compiled_ok(launches, architecture, products=KERNELS)) == ALL


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.representative(width=64, dtype=torch.float32)
@pytest.mark.extended
def test_compiles_for_other_dtypes(compiled_ok: CompiledOk, width: int, dtype: torch.dtype) -> None:
    products = KERNELS if dtype == torch.float16 else ()
    compiled_ok(_launches(width=width, dtype=dtype), 90, products=products)


@pytest.mark.parametrize("width", [16, 36, 80, 144])
@pytest.mark.representative(width=80)
@pytest.mark.extended
def test_compiles_for_other_widths(compiled_ok: CompiledOk, width: int) -> None:
    compiled_ok(_launches(width=width), 90, products=KERNELS)


def test_a_new_batch_compiles_nothing() -> None:
    generator = random.Random(0)
    keys = set()
    for _ in range(200):
        count = generator.randint(0, 20)
        tokens = [generator.randint(0, 60) for _ in range(count)]
        frames = [generator.randint(0, 200) for _ in range(count)]
        spare = generator.randint(0, 20), generator.randint(0, 20)
        interleaved = generator.random() < 0.5
        launches = _launches(tokens, frames, spare=spare, interleaved=interleaved)
        keys |= {aot.key(x) for x in launches}
    assert len(keys) == len(ALL)


def test_addresses_are_of_64_bit(compiled_ok: CompiledOk) -> None:
    """A million rows of 8 heads of 256 channels are more than 32 bits can number."""
    for name, needs in compiled_ok(_launches(), 90).items():
        wide = [x for x in needs.ttir.splitlines() if "arith.muli" in x and "i64" in x]
        assert wide, f"{name} multiplies no offset in 64 bits"


def test_loads_whole_vectors(compiled_ok: CompiledOk) -> None:
    """Tiles arrive in copies of 16 bytes, also where a head has 80 channels."""
    for width in (64, 80):
        found = compiled_ok(_launches(width=width), 90)
        for name in KERNELS:
            needs = found[name]
            assert "cp.async.cg.shared.global" in needs.ptx, f"{name} at width {width}"
            assert "ld.global.b16" not in needs.ptx, f"{name} at width {width}"
