"""Forward and backward of a FastConformer L encoder, from mel frames, beside transformers'.

    python profiling/bench.py encoder [--output ROWS.csv] [--budget-s S] [--modes MODE ...] [--tiny]

Utterances of one length, so that nobody computes padding: 103 of 10.2 s and 37 of 20.5 s, those of
NeMo's published steps (NVIDIA/NeMo 16052). bfloat16 on a GPU, by autocast.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks import harness
from benchmarks.speech import padded_features
from effasr.data.collate import Example, collate
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.nn.stack import compile_layers
from effasr.training.flops import peak_flops

COLUMNS = (
    *("system", "mode", "utterances", "seconds", "step_ms", "audio_s_per_s", "peak_bytes"),
    *("peak_tflops", *harness.VERSIONS),
)
MODES = ("eager", "graph", "compile", "graph_compile")
SIZES = {
    "large": (FastConformerConfig(), ((103, 10.2), (37, 20.5))),
    "tiny": (
        FastConformerConfig(width=16, layers=1, heads=2, feed_forward=32, subsampling_channels=4),
        ((2, 1.0),),
    ),
}
Encoder = tuple[torch.nn.Module, Callable[[], Tensor]]
Audio = list[np.ndarray]


def _ours(config: FastConformerConfig, audio: Audio, device: torch.device, mode: str) -> Encoder:
    model = ASRModel(ModelConfig(encoder=config, decoder=None, ctc=True), 8).to(device).train()
    if "compile" in mode:
        compile_layers(model)
    examples = [Example(str(n), samples, [2], [3]) for n, samples in enumerate(audio)]
    batch = collate(examples, eos_id=1, pad_id=0).to(device)
    mel = model.features(batch.audio, batch.frames.with_tile_tables())
    return model.encoder, lambda: model.encoder(mel).values


def _transformers(config: FastConformerConfig, audio: Audio, device: torch.device) -> Encoder:
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    off = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")
    encoder = ParakeetEncoder(
        ParakeetEncoderConfig(
            hidden_size=config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            intermediate_size=config.feed_forward,
            subsampling_conv_channels=config.subsampling_channels,
            num_mel_bins=ModelConfig().features.mel_bins,
            **dict.fromkeys(off, 0.0),
        )
    )
    inputs = padded_features(ModelConfig().features, audio, device)
    encoder = encoder.to(device).train()
    return encoder, lambda: encoder(**inputs).last_hidden_state


def _step_of(encoder: Encoder, mode: str, device: torch.device) -> Callable[[int], object]:
    module, forward = encoder

    def step(number: int = 0) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            values = forward()
        values.float().square().mean().backward()
        module.zero_grad(set_to_none=False)

    if "graph" not in mode:
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return lambda number: graph.replay()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("encoder", __doc__)
    parser.add_argument("--budget-s", type=float, default=120.0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES, help="of a GPU")
    parser.add_argument("--tiny", action="store_true", help="two short utterances, on a CPU")
    options = parser.parse_args(arguments)
    device = torch.device("cpu") if options.tiny else harness.default_device()
    gpu = device.type == "cuda"
    config, sizes = SIZES["tiny" if options.tiny else "large"]
    end, repeats, peak = time.monotonic() + options.budget_s, 20 if gpu else 2, peak_flops(device)
    table = harness.Table(COLUMNS, options.output, device)
    systems = [("effasr", mode) for mode in (options.modes if gpu else MODES[:1])]
    for count, length in sizes:
        noise = np.random.default_rng(0).standard_normal((count, round(length * 16_000)))
        audio = list(0.1 * noise.astype(np.float32))
        for system, mode in [*systems, ("transformers", "eager")]:
            if time.monotonic() > end:
                break
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                make = _ours(config, audio, device, mode) if system == "effasr" else None
                step = _step_of(make or _transformers(config, audio, device), mode, device)
                # A recording takes its memory when it is made, not when it is replayed.
                made_bytes = torch.cuda.max_memory_allocated() if gpu else 0
                seconds, peak_bytes = harness.in_sequence(step, repeats + 3, device)
            except (ImportError, RuntimeError, ValueError) as reason:
                text = " ".join(str(reason).split())[:200]
                harness.complain(f"bench encoder: {system}, {mode}: {text}")
                continue
            step_s = harness.percentiles(seconds[2:])[1]
            row = {"system": system, "mode": mode, "utterances": count, "seconds": length}
            row |= {"step_ms": round(1e3 * step_s, 3)}
            row |= {"audio_s_per_s": round(count * length / step_s, 1)}
            row |= {"peak_bytes": "" if peak_bytes is None else max(peak_bytes, made_bytes)}
            row |= {"peak_tflops": "" if peak is None else peak / 1e12}
            table.add(
                row,
                f"{system:13} {mode:14} {count} x {length} s {row['step_ms']:10.2f} ms "
                f"{row['audio_s_per_s']:10.0f} audio s / s",
            )
    return 0 if table.rows else 1
