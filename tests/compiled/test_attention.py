"""`attention` and `guided_attention`, compiled for GPUs that need not be there."""

import random
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot
import pytest
import torch

import effasr_kernels
from effasr_kernels import Context
from effasr_kernels.runtime.launch import Launch
from tests.compiled.launches import RECORD, of_kernels
from tests.support.kernel_resources import (
    Product,
    Resources,
    cuobjdump,
    overwritten_operands,
    products_of,
    resources_of,
)

REACH = 200
FORWARD, KEYS, QUERIES = "attention_forward", "attention_backward_kv", "attention_backward_q"
KERNELS = {FORWARD, KEYS, QUERIES}
RELATIVE = {"scores", "grad_queries", "grad_table"}
DROPOUT = {"dropout": 0.1, "seed": 1}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"position": "rotary"},
    "relative": {"position": "relative"},
    "dropout": DROPOUT,
    "all_with_rotary": {"position": "rotary", "causal": True, **DROPOUT},
    "all_with_relative": {"position": "relative", "causal": True, **DROPOUT},
    "grouped": {"causal": True, "group": 4},
    "grouped_with_rotary": {"position": "rotary", "causal": True, "group": 4, **DROPOUT},
    "context_with_rotary": {"position": "rotary", "context": Context(70, 0, 14), **DROPOUT},
    "context_with_relative": {"position": "relative", "context": Context(70, 0, 14), **DROPOUT},
    "guided": {"lengths_k": (40, 7, 150), **DROPOUT},
    "guided_without_dropout": {"lengths_k": (40, 7, 150)},
}
_REGISTERS_OF_A_MULTIPROCESSOR = 65_536

CompiledOk = Callable[..., dict[str, Resources]]


def products(features: str) -> set[str]:
    """Kernels with tensor cores; with relative positions, queries have a kernel of their own."""
    return (KERNELS - {QUERIES}) | RELATIVE if "relative" in features else KERNELS


def launches_of(
    features: str,
    architecture: int = 90,
    dtype: torch.dtype = torch.bfloat16,
    *,
    width: int = 64,
    **options: Any,
) -> list[Launch]:
    guided = features.startswith("guided")
    lengths = (9, 0, 40) if guided else (40, 7, 150)
    # Batches of training have tables of their tiles.
    usual = {"lengths": lengths, "heads": 8, "width": width, "tables": True} | FEATURES[features]
    if not guided:
        usual["longest"] = REACH
    name = "guided_attention" if guided else "attention"
    launches = RECORD[name](architecture, dtype, **{"tail": 3} | usual | options)
    assert all(x.constants["GUIDED"] == guided for x in launches if "GUIDED" in x.constants)
    return launches


@pytest.mark.parametrize(
    ("features", "width", "architecture"),
    [
        (features, width, architecture)
        for features in FEATURES
        for width in (64, 128)
        for architecture in (80, 90, 100)
        # There grouped and guided kernels would spill.
        if (width, architecture) != (128, 100) or "relative" in features
    ],
)
@pytest.mark.representative(
    width=64,
    features=[
        *("all_with_rotary", "all_with_relative", "grouped", "context_with_relative"),
        *("guided", "guided_without_dropout"),
    ],
)
@pytest.mark.representative(width=128, features=["all_with_relative", "grouped"])
def test_usual_widths(
    features: str, width: int, architecture: int, compiled_ok: CompiledOk
) -> None:
    launches = launches_of(features, architecture, width=width)
    compiled_ok(launches, architecture, products=products(features))


@pytest.mark.parametrize(
    ("features", "width", "dtype"),
    [
        ("all_with_relative", 64, torch.float32),
        *(
            pytest.param(features, width, dtype, marks=pytest.mark.extended)
            for features, widths, dtype in (
                *(
                    (features, (256,), torch.bfloat16)
                    for features in ("plain", "all_with_rotary", "all_with_relative", "guided")
                ),
                *((x, (256,), torch.bfloat16) for x in FEATURES if x.startswith("context")),
                *(
                    (features, (64, 128, 256), torch.float32)
                    for features in ("plain", "all_with_rotary", "context_with_relative", "guided")
                ),
                ("all_with_relative", (128, 256), torch.float32),
                ("dropout", (256,), torch.float32),
                ("all_with_relative", (64,), torch.float16),
                ("plain", (128,), torch.float16),
                ("all_with_rotary", (256,), torch.float16),
                ("guided", (64, 128, 256), torch.float16),
                ("rotary", (16, 36), torch.bfloat16),
                ("plain", (36, 96, 144), torch.bfloat16),
                ("relative", (16, 36, 80), torch.bfloat16),
                ("context_with_relative", (48,), torch.bfloat16),
                ("guided", (16, 36, 80, 144), torch.bfloat16),
            )
            for width in widths
        ),
    ],
    ids=str,
)
def test_other_widths_and_dtypes(
    features: str, width: int, dtype: torch.dtype, compiled_ok: CompiledOk
) -> None:
    launches = launches_of(features, 90, dtype, width=width)
    compiled_ok(launches, 90, products=() if dtype == torch.float32 else products(features))


@pytest.mark.parametrize("features", ["all_with_rotary", "all_with_relative"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.representative(width=128, features="all_with_relative")
def test_compiles_with_tile_tables(compiled_ok: CompiledOk, width: int, features: str) -> None:
    """As many programs share a multiprocessor, up to two, and none searches before its loop."""
    kernels = products(features) - RELATIVE
    launches = launches_of(features, width=width)
    # Without tables, it may spill a few bytes.
    alone = launches_of(features, width=width, tables=False)
    searching = {x.kernel.fn.__name__: resources_of(x, 90) for x in alone}
    reading = compiled_ok(launches, 90)
    warps = {x.kernel.fn.__name__: x.options["num_warps"] for x in launches}
    for name in kernels:
        before, after = (
            _REGISTERS_OF_A_MULTIPROCESSOR // (32 * warps[name] * -(-x[name].registers // 8) * 8)
            for x in (searching, reading)
        )
        assert after >= min(before, 2), name
        assert reading[name].shared <= searching[name].shared, name
        assert "tt.reduce" not in reading[name].ttir.split("scf.for")[0], name


@pytest.mark.parametrize(
    ("features", "width"),
    [
        *(("all_with_rotary", 64), ("all_with_relative", 64), ("guided", 64), ("guided", 80)),
        ("context_with_relative", 64),
        pytest.param("context_with_rotary", 64, marks=pytest.mark.extended),
    ],
)
def test_loads_are_wide_and_fetched_ahead(
    compiled_ok: CompiledOk, features: str, width: int
) -> None:
    """A mask, a loop bound or the start of a tile in the wrong form would undo both unnoticed."""
    compiled = compiled_ok(launches_of(features, width=width), 90)
    for name in products(features) - RELATIVE:
        assert "cp.async.cg.shared.global" in compiled[name].ptx, name
        narrow = r"(?:ld|st)\.global[.\w]*\.[bu](?:8|16)\b"
        assert not re.findall(narrow, compiled[name].ptx), name


@pytest.mark.parametrize("features", ["all_with_relative", "guided"])
def test_offsets_have_64_bits(features: str, compiled_ok: CompiledOk) -> None:
    """A million rows of 8 heads of 256 channels are more than 32 bits can number."""
    compiled = compiled_ok(launches_of(features), 90)
    moved = re.compile(r"tt\.addptr %(\w+), .* : !tt\.ptr<(?:bf16|f32)>, (i\d+)")
    for name in products(features) - RELATIVE:
        # An argument itself, not a pointer that has been moved before.
        steps = [step for step in moved.findall(compiled[name].ttir) if not step[0][-1].isdigit()]
        assert steps, name
        assert all(width == "i64" for _, width in steps), (name, steps)
    for name in RELATIVE & compiled.keys():
        # A row times a stride: of the queries, of the buffer and of the table.
        multiplied = r"arith\.muli [^\n]*: (?:tensor<[^>]*x)?i64"
        assert len(re.findall(multiplied, compiled[name].ttir)) >= 3, name
    if features == "guided":
        assert re.search(r"arith\.muli.*i64", compiled["attention_delta"].ttir)


def test_pairs_of_keys_of_relative_scores_move_together(compiled_ok: CompiledOk) -> None:
    """The skew takes no instructions on 16 bits."""
    compiled = compiled_ok(launches_of("relative"), 90)
    for name in RELATIVE:
        access = "st" if name == "scores" else "ld"
        # One for each of the few that a program does once, none in a loop.
        assert len(re.findall(rf"{access}\.global\.b16", compiled[name].ptx)) <= 2, name
        assert len(re.findall(rf"{access}\.global\.b32", compiled[name].ptx)) >= 8, name


@pytest.mark.parametrize(
    ("features", "binaries"),
    # Forward, delta, two backward kernels; one that rotates; scores twice, gradients and sums. A
    # table for each size of tiles.
    [("dropout", 5), ("rotary", 6), ("relative", 9), ("guided", 5)],
)
def test_no_batch_compiles_anything(features: str, binaries: int) -> None:
    draw, keys = random.Random(0), set()
    for _ in range(200):
        lengths = tuple(draw.randint(0, 60) for _ in range(draw.randint(1, 20)))
        options: dict[str, Any] = {"lengths": lengths, "heads": 1, "tail": draw.randint(0, 50)}
        if features == "guided":
            options["lengths_k"] = tuple(draw.randint(0, 60) for _ in lengths)
        keys |= {aot.key(launch) for launch in launches_of(features, **options)}
    assert len(keys) == binaries, sorted(key[0] for key in keys)


def test_all_contexts_share_a_binary() -> None:
    contexts = (Context(70, 0, 14), Context(0, 0, 1), Context(None, 7, 16), Context(1, None, 3))
    keys = [
        {aot.key(x) for x in launches_of("relative", context=context, longest=None)}
        for context in contexts
    ]
    assert keys[0]
    assert all(other == keys[0] for other in keys)


REPEATED = {"plain": KERNELS, "guided": {FORWARD, QUERIES}}
"""Kernels that repeat products at a head width of 256, which no recipe has: 4 warps, or tiles of
128 rows, take every register of a thread there, or more."""


@pytest.mark.parametrize(
    ("features", "width"),
    [
        *((x, 64) for x in ("plain", "all_with_rotary", "all_with_relative")),
        *(("all_with_relative", 128), ("guided", 64), ("guided_without_dropout", 64)),
        *(
            pytest.param(features, width, marks=pytest.mark.extended)
            for features, widths in (
                *(("dropout", (64, 128)), ("relative", (64, 128)), ("plain", (128, 256))),
                *(("all_with_rotary", (128,)), ("guided", (128, 256))),
                ("guided_without_dropout", (128,)),
            )
            for width in widths
        ),
    ],
)
def test_no_warp_repeats_a_product_of_another(
    features: str, width: int, compiled_ok: CompiledOk
) -> None:
    """Warps of a product whose result is an operand of the next lie along its rows.

    Each has 16 or more: with more warps than that, some repeat the work of others, which no result
    shows. What no longer repeats a product must leave the list.
    """
    kernels = products(features) - RELATIVE
    repeated = set()
    launches = of_kernels(launches_of(features, width=width), *kernels)
    for name, needs in compiled_ok(launches, 90, products=kernels).items():
        made = products_of(needs.ttgir)
        assert len(made) >= 2, name
        if any(x.is_repeated for x in made):
            repeated.add(name)
    assert repeated == (REPEATED[features] if width == 256 else set())


def test_a_repeated_product_is_recognized() -> None:
    """The text of the compiler for 64 x 32 scores in 8 warps, and for 128 x 32."""
    ttgir = """
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [8, 1], instrShape = []}>
#blocked = #ttg.blocked<{warpsPerCTA = [8, 1], order = [1, 0]}>
    %1 = ttng.warp_group_dot %a, %b, %c : !ttg.memdesc<64x128> -> tensor<64x32xf32, #mma> loc(#1)
    %2 = tt.dot %a, %b, %c : tensor<128x16xf16> -> tensor<128x32xf32, #mma> loc(#2)
    %3 = tt.dot %a, %b, %c : tensor<128x16xf16> -> tensor<128x32xf32, #blocked> loc(#2)
"""
    first, second = products_of(ttgir)
    assert first == Product(64, 32, 8, 1)
    assert first.is_repeated
    assert not second.is_repeated


def test_an_operand_that_a_loop_overwrites_is_recognized() -> None:
    """R92 is of before the loop in its first pass alone; R96 is of the same pass in each."""
    sass = """Function : kernel
        /*0010*/                   F2FP.BF16.F32.PACK_AB R92, R2, R3 ;  /* 0x02 */
        /*0020*/                   LDS.128 R96, [R4] ;                  /* 0x04 */
        /*0030*/                   HGMMA.64x32x16.F32.BF16 R24, R92, gdesc[UR8], R24 ;
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R24, R96, gdesc[UR8], R24, gsb0 ;
        /*0050*/                   STS [R92], R24 ;
        /*0060*/              @!P0 IMAD.WIDE R94, R4, 0x20, R6 ;
        /*0070*/               @P1 BRA 0x20 ;
        /*0080*/                   MOV R93, R5 ;
Function : other
        /*0010*/                   MOV R92, R5 ;
"""
    assert overwritten_operands(sass) == {"kernel": {94, 95}, "other": set()}


CSRC = Path(effasr_kernels.__file__).parents[2] / "csrc"


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize("architecture", ["80", "90a", "100"])
@pytest.mark.representative(architecture="90a")
def test_no_kernel_of_nvcc_spills(architecture: str, tmp_path: Path) -> None:
    command = "nvcc", "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v"
    cubin = tmp_path / "kernels.cubin"
    done = subprocess.run(
        [*command, str(CSRC / "attention_forward.cu"), "-o", str(cubin)],
        check=True,
        capture_output=True,
        text=True,
    )
    text = done.stderr
    names = re.findall(
        r"Compiling entry function '\w*?\d(attention_\w+?)INS_\d(\w+)ELi(\d+)E", text
    )
    stack = [int(x) for x in re.findall(r"(\d+) bytes stack frame", text)]
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", text)]
    assert len(set(names)) == len(stack) == len(registers) == 4
    assert not any(stack), dict(zip(names, stack, strict=True))
    assert not any(overwritten_operands(cuobjdump("-sass", cubin)).values())
    # ptxas says where products of wgmma wait for each other, and where it adds a fence.
    assert not re.search("wgmma|GMMA", text)
    for (_, _, width), count in zip(names, registers, strict=True):
        # Blocks of 128 threads that shared memory lets a multiprocessor have.
        assert count <= (168 if width == "64" else 255)
