"""The kernels of each operation, compiled for GPUs that need not be there."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aot
import pytest
import torch

from effasr.optim.fused_adamw import FusedAdamW
from effasr_kernels import OPERATIONS, BackendUnavailable, PackedLayout, rms_norm
from effasr_kernels.runtime import launch
from effasr_kernels.runtime.deferred_sums import PartialSums, waiting
from effasr_kernels.runtime.launch import recording
from effasr_kernels.shared import projection
from effasr_kernels.shared.partial_sums import summed, summed_parts, sums_of_layer
from effasr_kernels.subsampling_stem import StemArguments
from effasr_kernels.subsampling_stem import _triton as subsampling_stem
from tests.compiled.conftest import ARCHITECTURES
from tests.compiled.launches import RECORD, names
from tests.support.kernel_resources import SHARED_LIMIT, Resources

CompiledOk = Callable[..., dict[str, Resources]]
Options = dict[str, Any]
HALF = {"dtype": torch.float16}
WIDE = {"dtype": torch.float32}


@dataclass(frozen=True)
class Text:
    """How often a pattern stands in what kernels compile to."""

    kernels: str | tuple[str, ...]
    source: str  # of `Resources`
    pattern: str
    least: int = 1
    most: float = float("inf")


@dataclass(frozen=True)
class Constraints:
    """What the kernels of an operation must satisfy.

    Attributes:
        usual: Options of usual sizes, for which all else holds.
        kernels: All that are launched.
        products: Those that use tensor cores, unless in float32.
        narrow_offsets: Those that need no 64-bit offsets.
        texts: What else they compile to.
        registers: At most, of a thread.
        other: Options to compile, too.
        extended: The same for `make test-all`, beside the usual ones in other dtypes.
        small: Options of the batches that must need no other binary; of each in turn.
        binaries: How many all those batches need.
    """

    usual: list[Options]
    kernels: set[str]
    small: list[Options]
    binaries: int
    products: set[str] = field(default_factory=set)
    narrow_offsets: set[str] = field(default_factory=set)
    texts: list[Text] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)
    other: list[Options] = field(default_factory=list)
    extended: list[Options] = field(default_factory=list)


LOAD_16, STORE_16 = r"ld\.global\S*\.v4\.b32", r"st\.global\S*\.v4\.b32"
DROPOUT = {"dropout": 0.1, "seed": 3, "offset": 3}
STREAM = {"wide": ("residual", "weight", "bias")}
PARAMETERS = {"wide": ("weight", "bias")}
MODES = ("pre-norm, bias", "post-norm", "addition", "norm")
OTHER_MODES = ("pre-norm", "post-norm, bias", "addition, bias")


def _norm(mode: str, **options: Any) -> Options:
    return {"mode": mode, "channels": 512, **options, **(DROPOUT if mode != "norm" else {})}


TABLE: dict[str, Constraints] = {
    "append_to_pages": Constraints(
        usual=[{}, WIDE],
        kernels={"append_rows"},
        # Rows are copied in pieces of 16 bytes, in float32 twice as many.
        texts=[Text("append_rows", "ptx", x, 2, 4) for x in (LOAD_16, STORE_16)],
        small=[{}],
        binaries=1,
    ),
    "batch_norm": Constraints(
        usual=[{"channels": 512, "wide": True}],
        kernels={"normalize", "sum_gradients", "normalize_backward"},
        # A multiprocessor runs four programs.
        registers={"normalize": 128, "sum_gradients": 128, "normalize_backward": 128},
        # A thread loads 8 values with 16 bytes; SiLU computes one exponential of each value.
        texts=[
            Text("normalize", "ptx", LOAD_16, 4),
            Text(("sum_gradients", "normalize_backward"), "ptx", LOAD_16, 4),
            Text("normalize", "ptx", r"ex2\.approx", 32, 32),
            Text(("sum_gradients", "normalize_backward"), "ptx", r"ex2\.approx", 16, 16),
            Text(
                ("normalize", "sum_gradients", "normalize_backward"),
                "ptx",
                r"ld\.global\S*\.b16",
                0,
                0,
            ),
        ],
        other=[
            {"channels": 512, "wide": True, **WIDE},
            {"channels": 176, "wide": True, "silu": False, "fixed": True},
        ],
        small=[{"channels": 64, "wide": True}],
        binaries=3,
    ),
    "best_alignment_loss": Constraints(
        usual=[{"width": 512, "tokens": (100, 200)}],
        kernels={"align", "spread"},
        products={"align"},
        other=[{"width": 512, "tokens": (90, 600), **WIDE}],
        small=[{"width": 64, "tokens": None, "longest": 64}],
        binaries=2,
    ),
    "bias_activation_dropout": Constraints(
        usual=[
            {"channels": 2048, "activation": x, "wide": True, **DROPOUT}
            for x in ("silu", "relu", "gelu")
        ],
        kernels={"activate", "activate_backward", "sum_rows"},
        narrow_offsets={"sum_rows"},
        texts=[
            Text("sum_rows", "ptx", LOAD_16),
            # Neither rows nor what is dropped is exchanged between threads, which have 16 bytes.
            Text(("activate", "activate_backward"), "ttgir", "convert_layout.*tensor<4x512x", 0, 0),
            Text(("activate", "activate_backward"), "ptx", STORE_16, 4),
        ],
        other=[
            {"channels": 2048, "bias": False, **DROPOUT, **WIDE},
            {"channels": 144, "wide": True, **DROPOUT},
        ],
        extended=[{"channels": 5120, "wide": True, **DROPOUT}],
        small=[{"channels": 16, "wide": True, **DROPOUT}],
        binaries=3,
    ),
    "decode_attention": Constraints(
        usual=[{"columns": 4, "new": True}],
        kernels={"attend_one"},
        # Keys and values come in pieces of 16 bytes, ahead of their use; so does the query.
        texts=[Text("attend_one", "ptx", r"cp\.async\.c[ag]\S* .*, 0x10,", 8)],
        other=[
            {"sequences": 2, "width": 64, "size": 375, "columns": 1},
            {"sequences": 2, "width": 256, "new": True},
        ],
        extended=[
            {"sequences": 2, "width": 64, "size": 375, "columns": 1, "hypotheses": 4},
            {"sequences": 2, "width": 256, "hypotheses": 20, "splits": 40},
        ],
        # Rows come by tiles or not.
        small=[
            {"hypotheses": x, "splits": 3, "width": 64, "size": size}
            for x in (1, 3)
            for size in (16, 64, 144)
        ],
        # For both numbers of hypotheses two ways to find a page; and the merging.
        binaries=5,
    ),
    "depthwise_conv": Constraints(
        usual=[{"taps": 9, "channels": 512, "gated": True, "statistics": True}],
        kernels={"convolve", "convolve_backward", "sum_rows", "fill_tile_table"},
        narrow_offsets={"fill_tile_table"},
        # A multiprocessor runs four programs, though the last of them merge statistics.
        registers={"convolve": 128},
        # Four channels of a thread at a time, two in the backward; and each input is gated once,
        # not for each tap: four in a pass of the loop, and in the forward the eight rows before it.
        texts=[
            Text("convolve", "ptx", r"ex2\.approx", 48, 48),
            Text("convolve", "ptx", r"ld\.global\S*\.v2\.b32", 24),
            Text("convolve_backward", "ptx", r"ex2\.approx", 8, 8),
            Text("convolve_backward", "ptx", r"ld\.global\S*\.b32", 12),
        ],
        other=[{"taps": 7, "channels": 145, "gated": True, "causal": True, "statistics": True}],
        extended=[
            {"taps": 9, "channels": 512, "causal": True, "bias": False},
            # The most taps fit in registers.
            {
                "taps": 32,
                "channels": 512,
                "gated": True,
                "causal": True,
                "statistics": True,
                **WIDE,
            },
        ],
        small=[{"taps": 9, "channels": 64, "gated": True, "statistics": True}],
        binaries=4,
    ),
    "dropout_add_layer_norm": Constraints(
        usual=[{"channels": 1024, **STREAM, **DROPOUT}],
        kernels={"add_norm", "add_norm_backward", "sum_rows"},
        narrow_offsets={"sum_rows"},
        # 16 bytes of float32 and 8 of bfloat16, four columns of a thread.
        texts=[
            Text(("add_norm", "add_norm_backward"), "ptx", rf"{access}\.global\S*\.{width}\.b32")
            for access in ("ld", "st")
            for width in ("v2", "v4")
        ],
        other=[
            {"channels": 1024, **STREAM, **WIDE},
            {"channels": 144, **STREAM, **DROPOUT},
        ],
        extended=[
            *(_norm(mode, **STREAM) for mode in (*MODES, *OTHER_MODES)),
            {"channels": 4096, **STREAM, **DROPOUT},
        ],
        small=[{"channels": 16, **STREAM, **DROPOUT}],
        binaries=3,
    ),
    "gated_activation": Constraints(
        usual=[{"width": 6144, "activation": x} for x in ("silu", "gelu_tanh")],
        kernels={"activate_gated", "activate_gated_backward"},
        texts=[
            Text(("activate_gated", "activate_gated_backward"), "ttgir", "convert_layout", 0, 0),
            Text(("activate_gated", "activate_gated_backward"), "ptx", LOAD_16, 8),
            Text(("activate_gated", "activate_gated_backward"), "ptx", STORE_16, 4),
        ],
        other=[{"width": 6144, **WIDE}, {"width": 144}],
        extended=[{"width": 6144, "activation": "gelu"}],
        small=[{"width": 64}],
        binaries=2,
    ),
    "grouped_linear": Constraints(
        usual=[{"inputs": 512, "outputs": 2048, "sizes": (150, 0, 300)}],
        kernels={"multiply", "multiply_transposed"},
        products={"multiply", "multiply_transposed"},
        # Two programs of 256 threads fit on a multiprocessor of sm_90.
        registers={"multiply": 128},
        other=[
            {"inputs": 512, "outputs": 2048, **WIDE},
            {"inputs": 256, "outputs": 256},
        ],
        extended=[{"inputs": 145, "outputs": 100, "bias": False}],
        small=[{"inputs": 64, "outputs": 64}],
        # The product of the forward, that of the gradient of x, and that of the weight's.
        binaries=3,
    ),
    "linear_cross_entropy": Constraints(
        usual=[{"width": 512, "classes": 1025, "label_smoothing": 0.1, "z_loss": 1e-4}],
        kernels={"_partial_normalizers", "_finish_statistics", "_grad_logits_kernel"},
        products={"_partial_normalizers"},
        narrow_offsets={"_finish_statistics"},
        # Two programs of 256 threads fit on a multiprocessor of sm_90.
        registers={"_partial_normalizers": 128},
        texts=[
            # Rows and classes, each as (first of the tile) times (stride), and the results.
            Text("_partial_normalizers", "ttir", r"arith\.muli .* : i64", 3),
            Text(
                "_finish_statistics", "ttir", r"arith\.(muli|addi) .* : (i64|tensor<[0-9x]+xi64>)"
            ),
            Text("_grad_logits_kernel", "ttir", r"arith\.muli .* : i64"),
            # Of any number of classes gradients are read and stored in wide pieces.
            *(Text("_grad_logits_kernel", "ptx", x) for x in (LOAD_16, STORE_16)),
        ],
        other=[
            {"width": 144, "classes": 1024, "label_smoothing": 0.1, "z_loss": 1e-4},
            {"width": 512, "classes": 1024, "label_smoothing": 0.1, **WIDE},
        ],
        extended=[{"width": 512, "classes": 1024, "bias": False}],
        small=[
            {"width": 64, "classes": 40, "z_loss": 1e-4, **x}
            for x in ({"label_smoothing": 0.1}, {"uniform_gradient": True})
        ],
        # Gradients in the backward have three kernels, and those in the forward two.
        binaries=5,
    ),
    "mask_features": Constraints(
        usual=[{}],
        kernels={"mask_rows"},
        texts=[Text("mask_rows", "ptx", LOAD_16), Text("mask_rows", "ptx", STORE_16)],
        extended=[{"slot": 4}],
        small=[{"mels": 16}],
        binaries=1,
    ),
    "normalize_features": Constraints(
        usual=[{}, {"log_guard": 0.0}],
        kernels={"normalize_rows"},
        texts=[Text("normalize_rows", "ptx", LOAD_16), Text("normalize_rows", "ptx", STORE_16)],
        extended=[{"slot": 4}],
        small=[{"mels": 16}],
        binaries=1,
    ),
    "audio_windows": Constraints(
        usual=[{}],
        kernels={"cut_windows"},
        texts=[Text("cut_windows", "ptx", STORE_16)],
        small=[{}],
        binaries=1,
    ),
    "projected_top_k": Constraints(
        usual=[{"rows": 1}, {"rows": 80, "k": 8}],
        kernels={"rank_parts", "merge_parts"},
        products={"rank_parts"},
        narrow_offsets={"merge_parts"},
        # The weight comes in pieces of 16 bytes, ahead of its use.
        texts=[Text("rank_parts", "ptx", r"cp\.async\.c[ag]\S* .*, 0x10,", 8)],
        other=[
            {"rows": 80, "k": 5, **WIDE},
            {"rows": 5, "width": 144, "count": 1_025, "k": 3},
        ],
        extended=[{"rows": 1, "k": 16, **WIDE}],
        small=[{"width": 64, "count": 400}],
        # For few and for many rows, and the merging.
        binaries=3,
    ),
    "rms_norm": Constraints(
        usual=[{"width": 2048, "wide": True}],
        kernels={"normalize", "normalize_backward", "sum_rows"},
        narrow_offsets={"sum_rows"},
        texts=[
            Text(("normalize", "normalize_backward"), "ptx", LOAD_16),
            Text(("normalize", "normalize_backward"), "ptx", STORE_16),
            # Tiles are not exchanged between threads.
            Text(
                ("normalize", "normalize_backward"), "ttgir", "convert_layout.*tensor<1x2048x", 0, 0
            ),
        ],
        other=[
            {"width": 2048, "frozen": True, **WIDE},
            *({"width": x, **WIDE} for x in (128, 8192)),
        ],
        extended=[{"width": 2048, "wide": True, "offset": 1}, {"width": 5120, **WIDE}],
        small=[{"width": 64, "wide": True}],
        binaries=3,
    ),
    "strided_depthwise": Constraints(
        usual=[{"channels": 256, "bins": 20, "relu": x} for x in (False, True)],
        kernels={"strided_forward", "strided_backward", "sum_rows"},
        # A thread has eight channels forward, and four backward; each input is read once.
        texts=[
            Text("strided_forward", "ptx", LOAD_16, 9, 9),
            Text("strided_forward", "ptx", STORE_16, 1, 1),
            Text("strided_backward", "ptx", r"ld\.global\S*\.v2\.b32", 8, 8),
        ],
        other=[{"channels": 256, "bins": 20, **WIDE}],
        small=[{"channels": 16}],
        binaries=3,
    ),
    "subsampling_stem": Constraints(
        usual=[{"channels": 256, "bins": 80, "per_slot": x} for x in (4, 8)],
        kernels={"stem_patches", "stem_forward", "stem_backward", "sum_rows"},
        products={"stem_forward", "stem_backward"},
        # Sixteen bytes at a time: to memory, and from there straight to where the products read.
        texts=[
            Text(("stem_patches", "stem_forward"), "ptx", STORE_16),
            Text(("stem_forward", "stem_backward"), "ptx", r"cp\.async\.c[ag]\S*", 9),
            Text(("stem_forward", "stem_backward"), "ptx", r"st\.global\S*\.b16", 0, 0),
        ],
        small=[{"channels": 16, "per_slot": x} for x in (4, 8)],
        binaries=4,
    ),
    "update_running_statistics": Constraints(
        usual=[{}],
        kernels={"update"},
        narrow_offsets={"update"},
        small=[{"channels": 64}],
        binaries=1,
    ),
}
ELSEWHERE = {"attention", "guided_attention", "ctc_loss", "transducer_loss"}
"""`test_attention.py`, `test_lattices.py`."""


def test_the_table_has_every_operation() -> None:
    assert set(OPERATIONS) - ELSEWHERE == set(TABLE)


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(
    ("name", "options"),
    [(name, options) for name, x in TABLE.items() for options in x.usual],
    ids=str,
)
def test_usual_sizes(
    name: str, options: Options, architecture: int, compiled_ok: CompiledOk
) -> None:
    constraints = TABLE[name]
    launches = RECORD[name](architecture, **options)
    products = () if options.get("dtype") == torch.float32 else constraints.products
    compiled = compiled_ok(launches, architecture, products=products)
    assert set(compiled) == constraints.kernels
    for kernel in constraints.kernels - constraints.narrow_offsets:
        assert re.search(r"arith\.muli.*i64", compiled[kernel].ttir), f"{kernel}: 32-bit offsets"
    for text in constraints.texts:
        for kernel in (text.kernels,) if isinstance(text.kernels, str) else text.kernels:
            count = len(re.findall(text.pattern, getattr(compiled[kernel], text.source)))
            assert text.least <= count <= text.most, f"{kernel}: {count} times {text.pattern}"
    for kernel, most in constraints.registers.items():
        if architecture >= 90 or not constraints.products:
            assert compiled[kernel].registers <= most
    for kernel in constraints.products & {"multiply", "_partial_normalizers", "rank_parts"}:
        if architecture >= 90:
            assert 2 * compiled[kernel].shared <= SHARED_LIMIT[architecture]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name, x in TABLE.items() for options in x.other),
        *(
            pytest.param(name, options, marks=pytest.mark.extended)
            for name, x in TABLE.items()
            for options in (*x.extended, *({**x.usual[0], **dtype} for dtype in (HALF, WIDE)))
        ),
    ],
    ids=str,
)
def test_other_sizes(name: str, options: Options, compiled_ok: CompiledOk) -> None:
    products = () if options.get("dtype") == torch.float32 else TABLE[name].products
    compiled_ok(RECORD[name](**options), 90, products=products)


@pytest.mark.parametrize("name", TABLE)
def test_no_batch_compiles_anything(name: str) -> None:
    draw, keys = random.Random(0), set()
    for number in range(200):
        first, index = divmod(number, len(TABLE[name].small))
        options = TABLE[name].small[index]
        if name in ("append_to_pages", "decode_attention", "projected_top_k"):
            # 1 and multiples of 16 may be other binaries to Triton.
            sizes = {"rows": [1, 16, 17, 64][first] if first < 4 else draw.randint(1, 256)}
            if name == "append_to_pages":
                sizes |= {x: draw.randint(1, 99) for x in ("size", "columns")}
            elif name == "decode_attention":
                sizes = {"sequences": draw.randint(1, 64), "columns": draw.randint(1, 30)}
        else:
            lengths = [draw.randrange(40) for _ in range(1 + draw.randrange(20))]
            lengths = [[1], [16], [128]][first] if first < 3 else lengths
            tail = 0 if first < 3 else draw.randrange(20)
            sizes = {"lengths": tuple(lengths), "tail": tail}
        keys |= {aot.key(launch) for launch in RECORD[name](**options, **sizes)}
    assert len(keys) == TABLE[name].binaries, sorted({key[0] for key in keys})


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [*MODES, *OTHER_MODES])
@pytest.mark.representative(stream=torch.bfloat16, mode=list(MODES))
def test_modes_of_dropout_add_layer_norm(
    mode: str, stream: torch.dtype, compiled_ok: CompiledOk
) -> None:
    """Neither rows nor what is dropped is exchanged between threads."""
    wide = STREAM if stream == torch.float32 else PARAMETERS
    compiled = compiled_ok(RECORD["dropout_add_layer_norm"](**_norm(mode, **wide)), 90)
    compiled.pop("sum_rows", None)
    for needs in compiled.values():
        assert not re.search(r"convert_layout.*tensor<4x512x", needs.ttgir)
        if stream == torch.bfloat16:
            for access in ("ld", "st"):
                assert set(re.findall(rf"{access}\.global\S*\.(v\d)\.b32", needs.ptx)) == {"v4"}


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("hypotheses", [1, 5])
def test_cross_attention_of_decoding_is_split_and_merged(
    hypotheses: int, architecture: int, compiled_ok: CompiledOk
) -> None:
    launches = RECORD["decode_attention"](architecture, hypotheses=hypotheses)
    name = "attend_one" if hypotheses == 1 else "attend_several"
    compiled = compiled_ok(launches, architecture, products={name} if hypotheses > 1 else ())
    assert set(compiled) == {name, "merge_parts"}
    # A tile of keys is loaded once for all hypotheses of a sequence.
    assert launches[0].grid == (32 * 8, 2, *((1,) if hypotheses > 1 else ()))


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("share", [2, 4, 8])
@pytest.mark.representative(share=4)
def test_heads_of_decoding_that_share_keys_load_them_once(
    share: int, width: int, architecture: int, compiled_ok: CompiledOk
) -> None:
    options = {"share": share, "width": width, "columns": 4, "new": True, "splits": 1}
    launches = RECORD["decode_attention"](architecture, **options)
    compiled = compiled_ok(launches, architecture, products={"attend_several"})
    assert set(compiled) == {"attend_several"}
    assert launches[0].grid == (32 * 8 // share, 1, 1)


EARLY = {"_loss_and_grad_kernel", "_upstream_scale_kernel"}


@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.parametrize(
    "options",
    [
        {"width": 1024, "classes": 5248, "label_smoothing": 0.1, "z_loss": 1e-4},
        {"width": 512, "classes": 1025, "bias": False},
        {"width": 512, "classes": 1024, "label_smoothing": 0.1, "z_loss": 1e-4, **WIDE},
    ],
    ids=str,
)
def test_gradients_in_the_forward_of_linear_cross_entropy(
    architecture: int, options: Options, compiled_ok: CompiledOk
) -> None:
    launches = RECORD["linear_cross_entropy"](architecture, uniform_gradient=True, **options)
    compiled = compiled_ok(launches, architecture)
    assert set(compiled) == EARLY
    row = compiled["_loss_and_grad_kernel"]
    # Rows of any length are read and written in pieces of 16 bytes.
    assert "ld.global.v4" in row.ptx
    assert re.search(r"st\.global\.v[24]", row.ptx)
    assert row.registers <= 128


@pytest.mark.parametrize(
    ("rows", "count", "splits"), [(1, 5_248, 164), (80, 5_248, 82), (256, 5_248, 55), (1, 20, 1)]
)
def test_few_rows_share_the_vocabulary(rows: int, count: int, splits: int) -> None:
    """So that every multiprocessor has work; the number depends on shapes alone."""
    product, merging = RECORD["projected_top_k"](rows=rows, width=64, count=count)
    assert product.grid == (splits, -(-rows // (16 if rows <= 16 else 64)))
    assert merging.grid == (rows,)


def test_frozen_weights_need_no_sums() -> None:
    frozen = RECORD["rms_norm"](width=64, frozen=True)
    assert names(frozen) == {"normalize", "normalize_backward"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.representative(dtype=torch.bfloat16)
def test_a_projection_of_rows_up_to_a_total(
    architecture: int, dtype: torch.dtype, compiled_ok: CompiledOk
) -> None:
    """As `ctc_loss` uses it: no classes, and a tail."""
    hidden, weight = torch.empty(300, 512, dtype=dtype), torch.empty(1025, 512, dtype=dtype)
    with recording(divmod(architecture, 10)) as launches:
        end = torch.zeros(1, dtype=torch.int32)
        projection.row_statistics(hidden, weight, weight[:, 0], total=end)
    products = () if dtype == torch.float32 else {"_partial_normalizers"}
    compiled_ok(launches, architecture, products=products)


def test_partial_sums_of_subsampling_stay_small() -> None:
    """However long the batch, the backward's buffer is of one size: four megabytes."""
    for slots in (10_000, 100_000):
        layout = PackedLayout.from_lengths((slots,))
        x = torch.empty(8 * slots, 80, dtype=torch.bfloat16, device="meta")
        taps, bias, grad = x.new_empty(256, 9), x.new_empty(256), x.new_empty(2 * slots, 20, 256)
        lengths = torch.empty(1, dtype=torch.int64, device="meta")
        with recording() as launches:
            arguments = StemArguments(x, taps, bias, taps, bias, layout, lengths)
            subsampling_stem.backward(arguments, (grad,), (grad,), ())
        assert launches[-1].args["partials"].numel() == 198 * 256 * 20


def test_wider_rows_are_refused() -> None:
    x, weight = torch.empty(1, 8193), torch.empty(8193)
    with recording(), pytest.raises(BackendUnavailable, match="more than 8,192 channels do not"):
        rms_norm(x, weight, eps=1e-6, backend="triton")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adamw(architecture: int, compiled_ok) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (70_000, 3)]
    optimizer = FusedAdamW([{"params": parameters}])
    optimizer.follow(
        {p: p.detach().clone() for p in parameters}, {p: p.detach().half() for p in parameters}
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.norm = torch.ones(())
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        optimizer.step()
    (made,) = launches
    # A chunk of 16,384 elements has a program of its own.
    assert made.grid == (6,)
    assert [len(made.read), len(made.written)] == [10, 10]
    (needs,) = compiled_ok(launches, architecture).values()
    # Room for five programs on a multiprocessor; loads and stores of 16 bytes, 64-bit offsets.
    assert needs.registers <= 96
    assert len(re.findall(r"ld\.global\.v4\.b32", needs.ptx)) >= 5
    assert len(re.findall(r"st\.global\.v4\.b32", needs.ptx)) >= 4
    assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("wide", "narrow"), [(3, 0), (2, 1), (9, 3)])
@pytest.mark.representative(wide=9, narrow=3)
def test_partial_sums(wide: int, narrow: int, architecture: int, compiled_ok) -> None:
    with waiting() as found:
        for _ in range(wide - 1):
            summed_parts(torch.empty(264, 3, 512), torch.float32, torch.bfloat16)
        summed(torch.empty(2246, 2, 8, 64), torch.bfloat16)
    for _ in range(narrow):
        rows, out = (torch.empty(*n, 1536, dtype=torch.bfloat16) for n in ((8448,), ()))
        found.append(PartialSums(rows, out, None, lambda: None))
    with launch.recording((architecture // 10, architecture % 10)) as launches:
        sums_of_layer(found)
    (needs,) = compiled_ok(launches, architecture).values()
    assert re.search(r"arith\.muli.*i64", needs.ttir), "offsets are not 64-bit"
    # Loads of 16 bytes, wherever a tensor begins.
    assert not re.search(r"ld\.global(\.cg)?\.b32 ", needs.ptx)
    # Leaves room for five programs on a multiprocessor.
    assert needs.registers <= 96
