"""Steps that are replayed, compiled, recomputed or made with weights cast once are those steps.

Of one shape: nothing is compiled twice, and nothing grows.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from effasr import config as configuration
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.config import DataConfig
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.transducer import TransducerConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.training import cuda_graph
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.cuda_graph import MicroBatchGraph
from effasr.training.resolve import resolve_config
from effasr.training.step import run_micro_batch, train_step
from effasr_kernels import Context, PackedLayout, PackedSequence
from tests.gpu.live_memory import Sizes
from tests.training.conftest import make_batch, without_randomness
from tests.training.shortage import shortage

FAST = OptimizerConfig(lr=0.01)
FUSED = replace(FAST, implementation="fused")
LSTM = TransducerConfig(width=8, joint=8, dropout=0.1)
STATELESS = replace(LSTM, predictor="stateless")
RECOMPUTED = {"activation_checkpointing": True}
LANGUAGES = ("de", "nl")
HALF = {"precision": "bfloat16", "bfloat16_weights": False}
COPIES = {"bfloat16_weights": True}
ADASCALE = {
    "optimizer": OptimizerConfig(lr=0.01, adascale=AdaScaleConfig(scale=2.0)),
    "data": DataConfig(micro_batches=2),
}

# Of each case: settings and loop of both runs, what the second run has in another way, and the step
# and place at which both are short of memory. "graph" and "transducer" are no settings of a run;
# "optimizer" is none of its loop.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "graph": ({}, {}, {"graph": True}, ""),
    "graph of lstm": ({"transducer": LSTM}, {}, {"graph": True}, ""),
    "graph of stateless": ({"transducer": STATELESS}, {}, {"graph": True}, ""),
    "recomputed": ({}, {}, RECOMPUTED, ""),
    "recomputed short in forward": ({}, {}, RECOMPUTED, "forward"),
    "recomputed short in backward": ({}, {}, RECOMPUTED, "backward"),
    "compiled recomputed": ({}, RECOMPUTED, {"compile": True}, ""),
    "compiled lora": ({"lora": True}, {}, {"compile": True}, ""),
    "graph of languages": ({"lora": LANGUAGES}, {}, {"graph": True}, ""),
    "recomputed languages": ({"lora": LANGUAGES}, {}, RECOMPUTED, ""),
    "copies": ({}, HALF, COPIES, ""),
    "copies recomputed": ({}, HALF | RECOMPUTED, COPIES, ""),
    "copies average": ({}, HALF | {"ema_decay": 0.9}, COPIES, ""),
    "fused": ({}, HALF | COPIES, {"optimizer": FUSED}, ""),
    "fused average": ({}, HALF | COPIES | {"ema_decay": 0.9}, {"optimizer": FUSED}, ""),
    "copies adascale": (ADASCALE, HALF, COPIES, ""),
    "copies lora": ({"lora": True}, HALF, COPIES, ""),
    "copies freeze": ({}, HALF | {"freeze": ("encoder.layers", "decoder.*.linear1")}, COPIES, ""),
    "copies transducer": ({"transducer": LSTM, "decoder": None}, HALF, COPIES, ""),
    "copies short": ({}, HALF, COPIES, "backward"),
    "copies graph": ({"graph": True}, HALF, COPIES, ""),
    "copies compiled": ({}, HALF | {"compile": True}, COPIES, ""),
}
OFTEN = [
    *("graph", "graph of lstm", "graph of stateless", "copies", "copies recomputed"),
    *("recomputed", "recomputed short in forward", "recomputed short in backward"),
    *("copies lora", "copies transducer", "copies short", "fused average"),
]


def train(
    make_train_state, batches, loop: dict[str, Any], short: str, steps: int, **settings
) -> list[Tensor]:
    is_graph = bool(loop.pop("graph", False) or settings.pop("graph", False))
    if "optimizer" in loop:
        settings["optimizer"] = loop.pop("optimizer")
    model, state = make_train_state(training=LoopConfig(max_steps=20, **loop), **settings)
    assert (state.weights is not None) == loop.get("bfloat16_weights", False)
    if is_graph:
        state = graphed(model, state)
    figures: list[float] = []
    for step in range(steps):
        calls = [1] if short and step == 1 else []
        with shortage(model, *calls, where=short):
            report = train_step(state, batches[2 * step : 2 * step + 2], step)
        assert (report.read()["finite"], report.read()["splits"]) == (1, len(calls))
        figures += report.read().values()
        figures += [x for _, losses in report.micro_batches for x in losses.tolist()]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    average = [] if state.average is None else state.average.average.values()
    return [*(x.clone() for x in model.state_dict().values()), *average, torch.tensor(figures)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.representative(case=OFTEN)
def test_the_run_is_the_same(case, make_train_state, make_lora_config, model_config, batches):
    settings, loop, change, short = CASES[case]
    # A compiled model rounds otherwise, which more steps would magnify.
    is_exact = not case.startswith("compiled")
    settings = ({"optimizer": FAST} if is_exact else {}) | settings
    model = {name: settings.pop(name) for name in ("transducer", "decoder") if name in settings}
    if model:
        settings["model"] = replace(model_config, **model)
        # Each batch has its own division of the nodes, within one budget.
        batches = [replace(batch, node_budget=600) for batch in batches]
    if languages := settings.pop("lora", False):
        config = make_lora_config()
        settings |= {"lora": config.lora, "init_from": config.init_from, "data": config.data}
        if languages is LANGUAGES:
            settings["lora"] = replace(config.lora, by_language=LANGUAGES)
            numbers = torch.tensor([0, 1, 2, 0])
            batches = [replace(x, expert=numbers.roll(n)) for n, x in enumerate(batches)]
    expected, results = (
        train(make_train_state, batches, loop | way, short, 3 if is_exact else 1, **settings)
        for way in ({}, change)
    )
    tolerance = {"rtol": 0.0, "atol": 0.0} if is_exact else {}
    if case == "copies adascale":
        # On some processors the gain, of sums of squared gradients, differs in its last digit.
        tolerance = {"rtol": 1e-6, "atol": 1e-9}
    torch.testing.assert_close(results, expected, **tolerance)


Outputs = tuple[Tensor, ...]


def record(run: Callable[[], Outputs], pool: Any = None) -> tuple[Callable, list[Tensor]]:
    """As a CUDA graph: nothing runs now, and each replay writes to the same outputs."""
    outputs: list[Tensor] = []

    def replay():
        results = run()
        outputs.extend([] if outputs else map(torch.empty_like, results))
        for old, new in zip(outputs, results, strict=True):
            old.copy_(new)

    return replay, outputs


def graphed(model, train_state):
    run = partial(run_micro_batch, train_state)
    device = torch.device("cpu")
    graph = MicroBatchGraph(run, device, model.parameters(), model.buffers(), record)
    return replace(train_state, graph=graph)


def test_each_context_has_a_recording(make_train_state, model_config, batches):
    contexts, drawn, results = (Context(4, 0, 2), Context(2, 0, 1)), [], []

    def capture(run):
        context = model.encoder.context
        drawn.append(context)
        replay, outputs = record(run)

        def replay_of_its_context():
            assert model.encoder.context == context
            replay()

        return replay_of_its_context, outputs

    several = replace(model_config, encoder=replace(model_config.encoder, context=contexts))
    for is_recorded in (False, True):
        model, state = make_train_state(model=several)
        if is_recorded:
            parts = model.parameters(), model.buffers(), capture, model.encoder
            graph = MicroBatchGraph(partial(run_micro_batch, state), torch.device("cpu"), *parts)
            state = replace(state, graph=graph)
        for step in range(6):
            train_step(state, [batches[step]], step)
        results.append([x.clone() for x in model.state_dict().values()])
    torch.testing.assert_close(*results, rtol=0.0, atol=0.0)
    assert sorted(drawn, key=contexts.index) == list(contexts)


def test_the_recording_has_inputs_of_its_own(make_train_state, batches):
    model, train_state = make_train_state()
    before = [x.clone() for x in batches[0].tensors()]
    train_step(graphed(model, train_state), batches[:2], 0)
    assert all(map(torch.equal, before, batches[0].tensors()))


def test_a_batch_with_more_tiles_is_recorded_anew(batches):
    recorded, outputs = [], (torch.zeros(()),)
    replays, alive = [], []

    def run(batch, counts, replace):
        recorded.append(batch.frames.with_tile_tables().tile_counts[4])
        return outputs

    def capture(run):
        alive.append([replay() is not None for replay in replays])
        replay = partial(int)
        replays.append(weakref.ref(replay))
        return replay, run()

    graph = MicroBatchGraph(run, torch.device("cpu"), [], [], capture)
    few, many = (PackedLayout.from_lengths(x, rows=40, num_sequences=9) for x in ([40], [5] * 8))
    for frames in (few, few, many, few):
        graph(replace(batches[0], frames=frames), torch.ones(1))
    # A warm-up and a recording for ten tiles, and a recording for sixteen.
    assert recorded == [12, 12, 18]
    # The first, which shares its memory, lasts until the second is made.
    assert alive == [[], [True]]
    assert [replay() is not None for replay in replays] == [False, True]


def test_error_messages(make_train_state, batches, model_config):
    model, train_state = make_train_state()
    train_state = graphed(model, train_state)
    train_step(train_state, batches[:1], 0)
    other = make_batch(0)
    other = replace(other, targets=other.targets[:-1])
    with pytest.raises(ValueError, match=r"static shape of the first.*cuda_graph=false"):
        train_step(train_state, [other], 1)
    for loop, message in (
        ({"cuda_graph": True}, r"`training\.cuda_graph` needs a GPU"),
        ({"precision": "float32", "bfloat16_weights": True},
         r"`training\.bfloat16_weights` must be false or auto"),
        ({"strategy": "fsdp2", "bfloat16_weights": True}, r"with training\.strategy fsdp2"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make_train_state(training=LoopConfig(**loop))
    narrow = replace(model_config, residual_in_fp32=False)
    with pytest.raises(ValueError, match=r"`model\.residual_in_fp32` must be true .*=bfloat16\."):
        make_train_state(model=narrow)
    # The default is autocast on a CPU.
    assert make_train_state(training=LoopConfig(precision="bfloat16"))[1].weights is None


GPU = torch.device("cuda")


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        ([], []),
        (["training.compile=true"], []),
        (["training.bfloat16_weights=true"], []),
        (["training.strategy=fsdp2"], ["training.strategy"]),
        (["training.strategy=h_adpsgd"], []),
        (["training.activation_checkpointing=2"], ["training.activation_checkpointing"]),
        (["data.strategy=bucketed", "data.batch_duration=100"], ["data.strategy"]),
        (["model.transducer.width=16"], []),
        (["model.transducer.durations=[0,1,2]"], []),
        (
            ["training.strategy=fsdp2", "training.activation_checkpointing=true"],
            ["training.strategy", "training.activation_checkpointing"],
        ),
    ],
)
def test_the_default_records_wherever_it_can(overrides, settings):
    config = configuration.load(TrainConfig, "small", overrides)
    assert config.training.cuda_graph == "auto"
    assert [x.setting for x in cuda_graph.obstacles(config, GPU)] == settings
    assert cuda_graph.uses_graph(config, GPU) == (not settings)
    on_cpu = cuda_graph.obstacles(config, torch.device("cpu"))
    assert [x.setting for x in on_cpu] == [*settings, "training.device"]
    assert not cuda_graph.uses_graph(config, torch.device("cpu"))
    told = cuda_graph.missed(config, GPU)
    assert (told is None) == (not settings)
    assert all(f"{x}: " in str(told) for x in settings)
    assert cuda_graph.missed(config, torch.device("cpu")) is None


@pytest.mark.parametrize("asked", [True, False])
def test_a_choice_is_not_changed(asked):
    overrides = ["training.activation_checkpointing=true", f"training.cuda_graph={asked}"]
    config = configuration.load(TrainConfig, "small", overrides)
    assert cuda_graph.uses_graph(config, GPU) == asked
    assert cuda_graph.missed(config, GPU) is None
    if asked:
        # The messages are those of `obstacles`.
        with pytest.raises(ValueError, match=r"cannot be rewound while a graph is recorded"):
            resolve_config(config, None)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("eager_compiler")
@pytest.mark.representative(compiled=False)
def test_the_default_builds_a_recording(make_train_state, batches, monkeypatch, compiled):
    """On a device that counts as a GPU, with a recording that a CPU can replay."""
    monkeypatch.setattr(cuda_graph, "obstacles_of_model", lambda model, device: [])
    monkeypatch.setattr(cuda_graph, "check_recordable", lambda model, context: None)
    monkeypatch.setattr(cuda_graph, "_capture", record)
    compile_module, calls = torch.nn.Module.compile, []

    def watched(self, **options):
        calls.append(options)
        compile_module(self, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", watched)
    results = []
    for choice in (False, "auto"):
        loop = LoopConfig(max_steps=20, compile=compiled, cuda_graph=choice)
        model, state = make_train_state(training=loop)
        assert (state.graph is not None) == (choice == "auto")
        assert len(calls) == (len(results) + 1 if compiled else 0)
        for step in range(2):
            train_step(state, batches[2 * step : 2 * step + 2], step)
        results.append(model.state_dict())
    for name, x in results[0].items():
        assert torch.equal(results[1][name], x), name


class _Casts(TorchDispatchMode):
    """Counts casts of given weights to bfloat16, one by one, and casts of many tensors at once."""

    def __init__(self, weights: list[Tensor]):
        super().__init__()
        self.count = self.together = 0
        self._addresses = {x.data_ptr() for x in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name == "aten::_to_copy" and out.dtype == torch.bfloat16:
            self.count += args[0].data_ptr() in self._addresses
        if name == "aten::_foreach_copy_":
            self.together += args[0][0].dtype != args[1][0].dtype
        return out


def half(*, copies: bool, **settings) -> LoopConfig:
    return LoopConfig(max_steps=20, precision="bfloat16", bfloat16_weights=copies, **settings)


def test_weights_are_cast_once_a_step(make_train_state, batches):
    counts = {}
    for copies in (False, True):
        model, state = make_train_state(training=half(copies=copies))
        linear = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
        train_step(state, batches[:2], 0)
        with _Casts(linear) as casts:
            train_step(state, batches[:2], 1)
        counts[copies] = casts.count, casts.together
    assert counts[False][0] >= 10
    assert counts[False][1] == 0
    assert counts[True][0] == 0
    # One for all weights, and one for the gradients of each layer and the rest in a micro-batch.
    assert counts[True][1] == 1 + 2 * 3


def test_frozen_weights_are_cast_again_where_they_change(make_train_state, batches):
    model, state = make_train_state(training=half(copies=True, freeze=("encoder",)))
    train_step(state, batches[:1], 0)
    layer = model.encoder.layers[0].feed_forward1.linear1
    with torch.no_grad():
        layer.weight.mul_(3)
    assert state.weights is not None
    state.weights.refresh()
    with state.weights.in_use():
        state.weights._layers[0][1].connect()
        assert layer.weight.dtype == torch.bfloat16
        used = layer.weight.clone()
    assert torch.equal(used, layer.weight.to(torch.bfloat16))


SHAPE = StaticShape(60, 50, 6, longest_frames=30, longest_tokens=20)


def in_shape(seed: int) -> Batch:
    """Utterances of other numbers and lengths, in the same shape."""
    generator = np.random.default_rng(seed)
    examples = [
        Example(
            str(n),
            generator.normal(size=int(generator.integers(3_000, 20_000))).astype(np.float32),
            [1, 2],
            generator.integers(3, 12, size=int(generator.integers(0, 6))).tolist(),
        )
        for n in range(int(generator.integers(2, 5)))
    ]
    return collate(examples, SHAPE, eos_id=1, pad_id=0)


HEADS = {
    "attention": None,
    "lstm": replace(LSTM, dropout=0.0),
    "stateless": replace(STATELESS, dropout=0.0),
}


def make_model(config: ModelConfig, head: str = "attention") -> ASRModel:
    """Without randomness, which a compiler may draw otherwise."""
    torch.manual_seed(0)
    config = without_randomness(config)
    if HEADS[head] is not None:
        config = replace(config, decoder=None, transducer=HEADS[head])
    return ASRModel(config, 12).train()


@pytest.mark.usefixtures("eager_compiler", "without_onednn")
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.representative(head=["attention", "lstm"])
def test_the_model_compiles_once_and_without_a_break(model_config, head):
    model = make_model(model_config, head)
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="aot_eager")
    options = {"label_smoothing": 0.1, "guided_sigma": 0.3} if head == "attention" else {}
    for seed in range(4):
        batch = in_shape(seed)
        results = []
        for call in (compiled, model):
            model.zero_grad()
            with torch._dynamo.config.patch(error_on_recompile=seed > 0):
                losses = call(batch, **options)
                sums = [losses.cross_entropy, losses.ctc, losses.guided, losses.transducer]
                sum(sums).backward()
            # Batch norm cancels the bias in front of it, whose gradient is rounding alone.
            gradients = [
                x.grad.clone()
                for name, x in model.named_parameters()
                if x.grad is not None and not name.endswith("conv.depthwise.bias")
            ]
            results.append([*sums, *gradients])
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_every_step_asks_for_the_same_memory(make_train_state):
    _, train_state = make_train_state()
    traces = []
    for step in range(4):
        batch = in_shape(step)
        # As on a GPU: on a CPU features depend on the lengths that the host knows.
        audio = PackedSequence(batch.audio.values, batch.audio.layout.rewritable())
        with Sizes() as sizes:
            train_step(train_state, [replace(batch, audio=audio)], step)
        traces.append(sizes.bytes)
    # The first step makes the optimizer's state.
    assert len(traces[1]) > 500
    assert traces[1] == traces[2] == traces[3]
