"""`attention` compiled for GPUs that need not be there."""

import random
import re
from collections.abc import Callable, Sequence

import pytest
import torch

from effasr_kernels import Context, PackedLayout, RelativeBias, Rotary
from effasr_kernels.attention.triton import backend
from effasr_kernels.runtime.launch import Launch, recording
from effasr_kernels.testing import aot
from tests.support.attention_arguments import attention_arguments

HEADS, REACH = 8, 200
KERNELS = {"attention_forward", "attention_backward_kv", "attention_backward_q"}
FEATURES = {
    "plain": {},
    "rotary": {"kind": "rotary"},
    "relative": {"kind": "relative"},
    "dropout": {"dropout": 0.1},
    "all_with_rotary": {"kind": "rotary", "dropout": 0.1, "causal": True},
    "all_with_relative": {"kind": "relative", "dropout": 0.1, "causal": True},
    "grouped": {"causal": True, "group": 4},
    "grouped_with_rotary": {"kind": "rotary", "dropout": 0.1, "causal": True, "group": 4},
    "context_with_rotary": {"kind": "rotary", "dropout": 0.1, "context": Context(70, 0, 14)},
    "context_with_relative": {"kind": "relative", "dropout": 0.1, "context": Context(70, 0, 14)},
}

_REGISTERS = 65_536
"""Of a multiprocessor."""

CompiledOk = Callable[..., dict[str, aot.Resources]]


def _kernels(kind: str = "none", **_: object) -> set[str]:
    """Those with tensor cores; with relative positions, queries have a kernel of their own."""
    return KERNELS - {"attention_backward_q"} if kind == "relative" else KERNELS


def _launches(
    lengths: Sequence[int] = (40, 7, 150),
    *,
    width: int = 64,
    kind: str = "none",
    causal: bool = False,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    capability: tuple[int, int] = (9, 0),
    spare: int = 3,
    longest: int | None = REACH,
    tables: bool = False,
    context: Context | None = None,
    group: int = 1,
) -> list[Launch]:
    """The launches of forward and backward, but for those that only relative positions need."""
    rows = sum(lengths) + spare
    layout = PackedLayout.from_lengths(lengths, rows=rows, static_max_seqlen=longest)
    if tables:
        layout = layout.with_tile_tables()
    q, k, v = torch.zeros(rows, 3, HEADS, width, dtype=dtype).unbind(1)
    k, v = (x[:, : HEADS // group] for x in (k, v))
    positions = {"none": None, "rotary": Rotary()}
    if kind == "relative":
        bias = torch.zeros(HEADS, width, dtype=dtype)
        table = torch.zeros(2 * REACH - 1, HEADS, width, dtype=dtype)
        positions[kind] = RelativeBias(bias, bias, table)
    arguments = attention_arguments(
        *(q, k, v, layout, layout),
        causal=causal,
        scale=width**-0.5,
        position=positions[kind],
        dropout=dropout,
        seed=1,
        context=context,
    )
    with recording(capability) as launches:
        results, saved = backend.forward(arguments)
        backend.backward(arguments, tuple(map(torch.ones_like, results)), results, saved)
    own = (*KERNELS, "attention_delta", "rotate")
    return [launch for launch in launches if launch.kernel.fn.__name__ in own]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("architecture", [80, 90, 100])
@pytest.mark.representative(
    features=[
        *("all_with_rotary", "all_with_relative", "grouped", "context_with_relative"),
    ]
)
def test_compiles_for_every_architecture(
    compiled_ok: CompiledOk, architecture: int, features: str
) -> None:
    launches = _launches(capability=(architecture // 10, 0), **FEATURES[features])
    compiled_ok(launches, architecture, products=_kernels(**FEATURES[features]))


@pytest.mark.parametrize("features", ["all_with_rotary", "all_with_relative"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.representative(width=128, features="all_with_relative")
def test_compiles_with_tile_tables(compiled_ok: CompiledOk, width: int, features: str) -> None:
    """As many programs share a multiprocessor, and none searches before its loop."""
    given = {"width": width, **FEATURES[features]}
    names = _kernels(**given)
    launches = _launches(**given, tables=True)
    searching = compiled_ok(_launches(**given), 90, products=names)
    reading = compiled_ok(launches, 90, products=names)
    assert searching.keys() == reading.keys()
    warps = {x.kernel.fn.__name__: x.options["num_warps"] for x in launches}
    for name in names:
        before, after = (
            _REGISTERS // (32 * warps[name] * -(-x[name].registers // 8) * 8)
            for x in (searching, reading)
        )
        assert after >= before, name
        assert reading[name].shared <= searching[name].shared, name
        assert "tt.reduce" not in reading[name].ttir.split("scf.for")[0], name


@pytest.mark.parametrize(
    "features",
    [
        "plain",
        "all_with_rotary",
        "all_with_relative",
        "grouped",
        "context_with_rotary",
        "context_with_relative",
    ],
)
@pytest.mark.parametrize("width", [128, 256])
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.representative(width=128, features=["all_with_relative", "grouped"])
def test_compiles_for_wide_heads(
    compiled_ok: CompiledOk, architecture: int, width: int, features: str
) -> None:
    launches = _launches(width=width, capability=(architecture // 10, 0), **FEATURES[features])
    compiled_ok(launches, architecture, products=_kernels(**FEATURES[features]))


@pytest.mark.parametrize(
    "features", ["plain", "all_with_rotary", "all_with_relative", "context_with_relative"]
)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.representative(width=64, features="all_with_relative")
def test_compiles_for_float32(compiled_ok: CompiledOk, width: int, features: str) -> None:
    compiled_ok(_launches(width=width, dtype=torch.float32, **FEATURES[features]), 90)


@pytest.mark.parametrize(
    ("width", "features"), [(64, "all_with_relative"), (128, "plain"), (256, "all_with_rotary")]
)
@pytest.mark.extended
def test_compiles_for_float16(compiled_ok: CompiledOk, width: int, features: str) -> None:
    launches = _launches(width=width, dtype=torch.float16, **FEATURES[features])
    compiled_ok(launches, 90, products=_kernels(**FEATURES[features]))


@pytest.mark.parametrize(
    ("width", "kind"),
    [(16, "rotary"), (36, "none"), (36, "rotary"), (80, "relative"), (96, "none"), (144, "none")],
)
@pytest.mark.extended
def test_compiles_for_other_widths(compiled_ok: CompiledOk, width: int, kind: str) -> None:
    compiled_ok(_launches(width=width, kind=kind), 90, products=_kernels(kind))


@pytest.mark.parametrize(
    "features",
    ["all_with_rotary", "all_with_relative", "context_with_rotary", "context_with_relative"],
)
def test_loads_are_wide_and_fetched_ahead(compiled_ok: CompiledOk, features: str) -> None:
    """A mask or a loop bound in the wrong form would undo both without an error."""
    found = compiled_ok(_launches(**FEATURES[features]), 90)
    for name in _kernels(**FEATURES[features]):
        assert "cp.async.cg.shared.global" in found[name].ptx, name
        assert not re.findall(r"ld\.global[.\w]*\.[bu](8|16)\b", found[name].ptx), name


def test_rows_are_found_with_64_bits(compiled_ok: CompiledOk) -> None:
    features = FEATURES["all_with_relative"]
    found = compiled_ok(_launches(**features), 90)
    moved = re.compile(r"tt\.addptr %(\w+), .* : !tt\.ptr<(?:bf16|f32)>, (i\d+)")
    for name in _kernels(**features):
        # An argument itself, not a pointer that has been moved before.
        steps = [step for step in moved.findall(found[name].ttir) if not step[0][-1].isdigit()]
        assert steps, name
        assert all(width == "i64" for _, width in steps), (name, steps)


@pytest.mark.parametrize("kind", ["none", "rotary", "relative"])
def test_a_new_batch_compiles_nothing(kind: str) -> None:
    generator = random.Random(0)
    keys: list[set] = []
    for _ in range(200):
        lengths = [generator.randint(0, REACH) for _ in range(generator.randint(0, 20))]
        launches = _launches(
            lengths, kind=kind, dropout=0.1, spare=generator.randint(1, 50), longest=None
        )
        keys.append({aot.key(launch) for launch in launches})
    assert keys[0]
    assert all(found == keys[0] for found in keys)


def test_all_contexts_share_a_binary() -> None:
    contexts = (Context(70, 0, 14), Context(0, 0, 1), Context(None, 7, 16), Context(1, None, 3))
    keys = [
        {aot.key(launch) for launch in _launches(kind="relative", context=context)}
        for context in contexts
    ]
    assert keys[0]
    assert all(found == keys[0] for found in keys)
