"""The machine computes as a GPU does, and shows what a GPU would get wrong."""

import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from emulator import machine
from emulator.emulate import arguments_of, compiled_by_nvcc, emulated, execute
from emulator.machine import Fault
from emulator.parse import Unknown, encode
from torch import Tensor

from effasr_kernels.runtime.launch import Launch, launch, recording
from tests.support.kernel_resources import resources_of

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs what is compiled"),
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++"))), reason="needs a C++ compiler"
    ),
]


@triton.jit
def multiply(
    a, b, c, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ACROSS_A: tl.constexpr, ACROSS_B: tl.constexpr,
):  # fmt: skip
    """C = A B, with operands stored along either side."""
    row, column = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for begin in range(0, depth, BLOCK):
        k = begin + tl.arange(0, BLOCK)
        if ACROSS_A:
            left = tl.load(a + k[None, :] * M + row[:, None])
        else:
            left = tl.load(a + row[:, None] * K + k[None, :])
        if ACROSS_B:
            right = tl.load(b + column[None, :] * K + k[:, None])
        else:
            right = tl.load(b + k[:, None] * N + column[None, :])
        total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * N + column[None, :], total)


@triton.jit
def reverse(values, copy, size, WAITS: tl.constexpr, BLOCK: tl.constexpr):
    """Write, and read what other threads wrote."""
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < size
    tl.store(copy + position, tl.load(values + position, mask=inside) * 2, mask=inside)
    if WAITS:
        tl.debug_barrier()
    other = tl.program_id(0) * BLOCK + BLOCK - 1 - tl.arange(0, BLOCK)
    tl.store(values + position, tl.load(copy + other, mask=other < size), mask=inside)


def _product(
    m: int, n: int, dtype: torch.dtype, across: tuple[bool, bool] = (False, False)
) -> tuple[Launch, Tensor]:
    torch.manual_seed(0)
    a, b = torch.randn(m, 64).to(dtype), torch.randn(64, n).to(dtype)
    c = torch.full((m, n), torch.nan)
    provided = [x.T.contiguous() if swap else x for x, swap in zip((a, b), across, strict=True)]
    with recording() as launches:
        sides = {"ACROSS_A": across[0], "ACROSS_B": across[1]}
        launch(multiply, (1,), *provided, c, 64, M=m, N=n, K=64, BLOCK=32, num_stages=3, **sides)
    return launches[0], a.double() @ b.double()


@pytest.mark.parametrize("across", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (64, 8), (128, 32), (16, 16)])
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.representative(across=[(False, False), (True, False)], dtype=torch.bfloat16)
def test_products_are_right(
    architecture: int, m: int, n: int, dtype: torch.dtype, across: tuple[bool, bool]
) -> None:
    """Products of tensor cores, from registers and from swizzled shared memory."""
    call, expected = _product(m, n, dtype, across)
    assert execute(call, architecture) > 0
    torch.testing.assert_close(call.args["c"].double(), expected, rtol=1e-5, atol=1e-4)


def _edited(call: Launch, architecture: int, edit: Callable[[str], str]) -> None:
    """Run a launch whose PTX was changed."""
    resources = resources_of(call, architecture)
    binary = machine.load(edit(resources.ptx))
    parameters, tensors = arguments_of(call, binary)
    machine.run(binary, call.grid, parameters, tensors, shared_bytes=resources.shared)


def _replaced(pattern: str, text: str, ptx: str) -> str:
    changed, count = re.subn(pattern, text, ptx)
    assert count
    return changed


@pytest.mark.parametrize(
    ("instruction", "architecture", "problem"),
    [
        (r"bar\.sync \t0;", 80, "no barrier between"),
        (r"cp\.async\.wait_group\s+\w+;", 80, "a copy that was not waited for"),
        (r"wgmma\.wait_group\.sync\.aligned \d;", 90, "nobody waits for|product is"),
        (r"wgmma\.fence\.sync\.aligned;", 90, r"without wgmma\.fence"),
    ],
    ids=["barriers", "waits_for_copies", "waits_for_products", "fences_of_products"],
)
def test_what_must_be_waited_for(instruction: str, architecture: int, problem: str) -> None:
    call, _ = _product(64, 64, torch.bfloat16)
    with pytest.raises(Fault, match=problem):
        _edited(call, architecture, partial(_replaced, instruction, ""))


def test_a_missing_fence_between_proxies() -> None:
    call, _ = _product(64, 64, torch.bfloat16, (True, True))
    copies = (
        r"cp\.async\.c[ag]\.shared\.global \[ (%r\d+) \+ 0 \], \[ (%rd\d+) \+ 0 \], 0x10, %r\d+;"
    )
    plain = r"ld.global.v4.b32 {%r90001,%r90002,%r90003,%r90004}, [\2];"
    plain += r"st.shared.v4.b32 [\1], {%r90001,%r90002,%r90003,%r90004};"

    def edit(ptx: str) -> str:
        return _replaced("fence.proxy.async.shared::cta;", "", _replaced(copies, plain, ptx))

    with pytest.raises(Fault, match=r"without fence\.proxy\.async"):
        _edited(call, 90, edit)


@pytest.mark.parametrize("seed", range(3))
def test_memory_is_shared_behind_barriers_alone(seed: int) -> None:
    values, copy = torch.arange(512.0), torch.zeros(512)
    with emulated(80, seed):
        launch(reverse, (2,), values, copy, 512, WAITS=True, BLOCK=256)
        assert torch.equal(values.view(2, 256), 2 * torch.arange(512.0).view(2, 256).flip(1))
        with pytest.raises(Fault, match=r"test_emulator\.py:\d+.* no barrier between .* of copy"):
            launch(reverse, (2,), values, copy, 512, WAITS=False, BLOCK=256)


def test_blocks_share_nothing() -> None:
    with emulated(80), pytest.raises(Fault, match="reads what another block wrote"):
        launch(count_up, (2,), torch.arange(512.0), 256, BLOCK=256)


@triton.jit
def count_up(values, size, BLOCK: tl.constexpr):
    """Each block adds one to the same numbers."""
    position = tl.arange(0, BLOCK)
    tl.store(
        values + position,
        tl.load(values + position, mask=position < size) + 1,
        mask=position < size,
    )


@triton.jit
def hand_on(values, copy, counter, total, BLOCK: tl.constexpr):
    """Blocks write; the last of them reads what all wrote."""
    position = tl.arange(0, BLOCK)
    block = tl.program_id(0) * BLOCK
    tl.store(copy + block + position, tl.load(values + block + position))
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        result = tl.zeros((BLOCK,), tl.float32)
        for other in range(tl.num_programs(0)):
            result += tl.load(copy + other * BLOCK + position, cache_modifier=".cg")
        tl.store(total + position, result)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (r"acq_rel", "acq_rel"),
        (r"acq_rel", "relaxed"),
        (r"acq_rel", "acquire"),
        (r"acq_rel", "release"),
        (r"bar\.sync\s+0;(?=(?:(?!bar\.sync)[\s\S])*atom\.)", ""),
        (r"(atom\.[\s\S]*?)bar\.sync\s+0;", r"\1"),
    ],
    ids=["ordered", "relaxed", "acquire", "release", "no_barrier_before", "no_barrier_behind"],
)
@pytest.mark.parametrize("architecture", [80, 90])
def test_blocks_are_ordered_by_atomics_that_release_and_acquire(
    architecture: int, before: str, after: str
) -> None:
    """And only behind barriers, if one thread of the block does the atomic."""
    values, copy, total = torch.arange(512.0), torch.zeros(512), torch.zeros(128)
    counter = torch.zeros(1, dtype=torch.int32)
    with recording() as launches:
        launch(hand_on, (4,), values, copy, counter, total, BLOCK=128)
    run = partial(_edited, launches[0], architecture, partial(_replaced, before, after))
    if before == after:
        run()
        assert torch.equal(total, values.view(4, 128).sum(0))
        return
    with pytest.raises(Fault, match="no barrier between"):
        run()


@pytest.mark.parametrize("size", [511, 513])
def test_nothing_outside_a_tensor(size: int) -> None:
    values, copy = torch.arange(512.0), torch.zeros(512)
    with emulated(80):
        if size == 511:
            launch(reverse, (2,), values, copy, size, WAITS=True, BLOCK=256)
            return
        with pytest.raises(Fault, match=r"reads outside of every tensor .* of values, which has "):
            launch(reverse, (3,), values, copy, size, WAITS=True, BLOCK=256)


LOOPS = """
.version 8.7
.target sm_80
.address_size 64
.visible .entry loops(
	.param .u64 .ptr .global .align 1 loops_param_0
)
.reqntid 64
{
	.reg .pred 	%p<4>;
	.reg .b32 	%r<8>;
	.reg .b64 	%rd<4>;
	ld.param.b64 	%rd1, [loops_param_0];
	mov.u32 	%r1, %tid.x;
	mul.wide.u32 	%rd2, %r1, 4;
	add.s64 	%rd3, %rd1, %rd2;
	mov.b32 	%r2, 0;
	mov.b32 	%r3, 0;
$L__BB0_1:
	setp.ge.u32 	%p1, %r3, %r1;
	@%p1 bra 	$L__BB0_3;
	add.s32 	%r3, %r3, 1;
	and.b32 	%r4, %r3, 1;
	setp.eq.b32 	%p2, %r4, 1;
	@!%p2 bra 	$L__BB0_2;
	add.s32 	%r2, %r2, %r3;
$L__BB0_2:
	bra.uni 	$L__BB0_1;
$L__BB0_3:
	shfl.sync.bfly.b32 	%r5, %r2, 1, 31, -1;
	st.global.b32 	[%rd3], %r5;
	ret;
}
"""


def test_lanes_part_and_meet_again() -> None:
    """Each thread adds the odd numbers up to its own, then takes its neighbour's sum."""
    binary = machine.load(LOOPS)
    result = torch.zeros(64, dtype=torch.int32)
    parameters = encode(result.data_ptr(), 8, False)
    machine.run(binary, (1,), parameters, [("found", result.data_ptr(), 256)], shared_bytes=0)
    assert result.tolist() == [sum(range(1, (n ^ 1) + 1, 2)) for n in range(64)]


def test_what_is_not_understood_is_an_error() -> None:
    with pytest.raises(Unknown, match=r"loops: unknown instruction sad\.u32"):
        machine.load(LOOPS.replace("add.s32 	%r2, %r2, %r3;", "sad.u32 	%r2, %r2, %r3, %r3;"))
    with pytest.raises(Unknown, match="label"):
        machine.load(LOOPS.replace("bra.uni 	$L__BB0_1", "bra.uni 	$L__BB0_9"))


BROKEN = Path(__file__).with_name("broken_kernels.cu")


def _reversed(
    fault: int, *, index: int = 2, blocks: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Run a kernel of `BROKEN`; returns the values of two blocks and its results."""
    # With a gap between them, where a third block reads.
    values, _, result = torch.arange(768.0).split(256)
    binary = machine.load(compiled_by_nvcc(BROKEN, 80), rf"\w*reverseILi{fault}E\w*")
    tensors = [(name, x.data_ptr(), 1024) for name, x in (("values", values), ("result", result))]
    parameters = b"".join(encode(x.data_ptr(), 8, False) for x in (values, result))
    parameters += encode(index, 4, False)
    machine.run(binary, (blocks,), parameters, tensors, shared_bytes=512, seed=seed)
    return values, result


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"fault": 1}, r":(16|21):\d+: .*, with no barrier between"),
        ({"fault": 2}, r":21:\d+: reads what a copy that was not waited for is to write"),
        ({"fault": 3}, r":24:\d+: reads what another warp wrote, with no barrier between"),
        ({"fault": 4}, r":22:\d+: waits at a barrier that others do not come to"),
        ({"fault": 0}, None),
        ({"fault": 0, "blocks": 3}, r":16:\d+: reads outside of every tensor .* of values"),
        ({"fault": 0, "index": 4}, r":30:\d+: an address outside of local memory"),
    ],
    ids=["barrier", "wait", "named_barrier", "too_few", "right", "outside", "local"],
)
@pytest.mark.parametrize("seed", range(3))
def test_kernels_of_nvcc(options: dict[str, int], problem: str | None, seed: int) -> None:
    """They run right, and a fault is reported with its line."""
    if problem is not None:
        with pytest.raises(Fault, match=rf"reverse.*broken_kernels\.cu{problem}"):
            _reversed(**options, seed=seed)
        return
    values, result = _reversed(**options, seed=seed)
    expected = 2 * values.view(2, 128).flip(1).reshape(-1, 32) + 2
    expected[:, :-1] += expected[:, 1:].clone()
    assert torch.equal(result, expected.view(-1))
