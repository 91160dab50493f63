"""Training throughput: packed against padded batches, and against transformers' Canary.

    python profiling/bench_training.py [--model small|canary_180m_flash|canary_1b_flash]
        [--systems packed_static packed random ...] [--frame-budget N] [--steps 20] [--output CSV]

Audio is noise and texts are random tokens, but durations are those of a list of real ones; no
system computes more frames a step than the budget, padding included. ``packed_static`` fills a
static shape, ``packed`` is the same without the tails; ``random``, ``bucketed``, ``sync_bucketed``
and ``sync_bucketed_2d`` are the batches of other toolkits, computed padded; ``transformers`` trains
Hugging Face's Canary with the same weights, the batches of ``random``, the same loss and the same
optimizer; its features are made before the clock starts. That both models give the same loss is
checked first. With --graph a CUDA graph replays the micro-batches of ``packed_static``. A row is
the median of the steps. With --profile DIR the steps are not timed but recorded, in
DIR/SYSTEM/rank0.json.gz, for ``profiling/report.py``. Needs torch and triton alone, but for the
bucketed systems, which are lhotse's, and transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from bench import rows
from bench.provenance import provenance
from bench.training_corpus import Workload, batches_of
from bench.training_systems import Effasr, Timed, Transformers, loss_difference

from effasr.data.batch import Batch, StaticShape
from effasr.model.asr import ASRModel, ModelConfig
from effasr.model.cost import cost_model
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS
from effasr.optim.adamw import OptimizerConfig
from effasr.training.config import LoopConfig, TrainConfig, resolve_losses
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.flops import peak_flops, work_of

PADDED = ("random", "bucketed", "sync_bucketed", "sync_bucketed_2d")
SYSTEMS = ("packed_static", "packed", *PADDED, "transformers")
COLUMNS = (
    *("system", "model", "precision", "frame_budget", "utterances", "audio_s", "step_s", "p20_s"),
    *("p80_s", "audio_s_per_s", "padding_frames", "padding_tokens", "peak_bytes", "mfu"),
    *("tflops_useful", "loss_difference", "graph", "device", "torch", "triton", "git", "date"),
)


def small(classes: int) -> tuple[ModelConfig, int]:
    """A model for a CPU."""
    encoder = FastConformerConfig(
        width=96, layers=4, heads=4, feed_forward=384, subsampling_channels=16
    )
    decoder = DecoderConfig(width=96, layers=2, heads=4, feed_forward=384)
    return ModelConfig(encoder=encoder, decoder=decoder), classes


@dataclass(frozen=True)
class Setup:
    """What is trained, and on what.

    Attributes:
        config: Of the run.
        model: On the host, with the weights that training begins with.
        workload: The corpus.
        shape: The static shape of its batches.
        device: Where.
    """

    config: TrainConfig
    model: ASRModel
    workload: Workload
    shape: StaticShape
    device: torch.device

    @classmethod
    def of(cls, options: argparse.Namespace) -> Setup:
        """By the command line; see `add_options`."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = device.type == "cuda"
        name = options.model or ("canary_180m_flash" if on_gpu else "small")
        if name == "small":
            model_config, classes = small(1024)
        else:
            model_config, classes = PRESETS[name], PRESET_VOCABULARIES[name]
        budget = options.frame_budget or (12_000 if on_gpu else 400)
        # Half a second short, since frames are rounded up.
        longest = min(options.longest, 0.08 * budget - 0.5)
        workload = Workload.of(options.utterances, classes, longest)
        config = TrainConfig(
            name=name,
            model=model_config,
            loss=resolve_losses(TrainConfig().loss, model_config),
            optimizer=OptimizerConfig(lr=1e-5),
            training=LoopConfig(precision="bfloat16" if on_gpu else "float32", ema_decay=None),
        )
        torch.manual_seed(0)
        model = ASRModel(model_config, classes)
        return cls(config, model, workload, workload.shape(budget), device)

    def with_graph(self, on: bool) -> Setup:
        """The same, whose micro-batches are a CUDA graph or not."""
        training = replace(self.config.training, cuda_graph=on)
        return replace(self, config=replace(self.config, training=training))

    def batches(self, system: str, count: int) -> list[Batch]:
        """The first micro-batches of a system, where the trainer's loader leaves them."""
        made = batches_of(system, self.workload, self.shape, count)
        return [batch.pin_memory() if self.device.type == "cuda" else batch for batch in made]

    def copy(self) -> ASRModel:
        """A model with these weights, on the device."""
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        model = ASRModel.from_state_dict(self.model.config, self.model.vocab_size, state)
        return model.to(self.device).train()


def run_system(system: str, setup: Setup, steps: int) -> dict[str, Any]:
    """Train for some steps; returns a row.

    Raises:
        ValueError: The losses of the two models differ.
        ImportError: What the system needs is not installed.
    """
    warm = min(3, steps)
    config, device, workload = setup.config, setup.device, setup.workload
    batches = setup.batches(system, steps + warm)
    model = setup.copy()
    fields: dict[str, Any] = {"frame_budget": setup.shape.frame_budget}
    if system == "transformers":
        fields["loss_difference"] = loss_difference(config, model, workload, device)
        if fields["loss_difference"] > 1e-3:
            raise ValueError(f"the losses differ by {fields['loss_difference']:.2g}: not timed")
        peer = Transformers(config, model, device)
        examples = [[workload.example(int(name)) for name in batch.ids] for batch in batches]
        timed = peer.time([peer.inputs(chosen) for chosen in examples], warm)
    else:
        timed = Effasr(config, model, device).time(batches, warm)
    return row(system, config, batches[warm:], timed, device) | fields


def record(system: str, setup: Setup, steps: int, folder: Path) -> Path:
    """Record some steps; returns the trace.

    Raises:
        ValueError: The system is not ours.
    """
    if system == "transformers":
        raise ValueError("only our own steps have ranges to be recorded with: leave it out")
    warm = 3
    batches = setup.batches(system, steps + warm)
    return Effasr(setup.config, setup.copy(), setup.device).record(batches, warm, folder / system)


def row(
    system: str, config: TrainConfig, batches: Sequence[Batch], timed: Timed, device: torch.device
) -> dict[str, Any]:
    """What was measured, as a row of the table."""
    assert config.model.decoder is not None
    cost = cost_model(config.model, PRESET_VOCABULARIES.get(config.name, 1024))
    audio = statistics.mean(batch.audio_seconds for batch in batches)
    # Of each step, since steps differ in size; a median, since a hiccup of the host is no figure.
    pairs = list(zip(batches, timed.seconds, strict=True))
    speed = statistics.median(batch.audio_seconds / seconds for batch, seconds in pairs)
    useful = statistics.median(work_of([batch], cost)[0] / seconds for batch, seconds in pairs)
    low, high = timed.seconds[0], timed.seconds[-1]
    if len(timed.seconds) > 1:
        low, *_, high = statistics.quantiles(timed.seconds, n=5, method="inclusive")
    peak = peak_flops(device)
    frames = sum(batch.num_frames for batch in batches)
    tokens = sum(batch.num_tokens for batch in batches)
    return dict.fromkeys(COLUMNS, "") | {
        "system": system,
        "model": config.name,
        "precision": config.training.precision,
        "utterances": round(statistics.mean(len(batch.ids) for batch in batches), 1),
        "audio_s": round(audio, 2),
        "step_s": round(statistics.median(timed.seconds), 5),
        "p20_s": round(low, 5),
        "p80_s": round(high, 5),
        "audio_s_per_s": round(speed, 1),
        "padding_frames": round(1 - frames / sum(batch.frames.rows for batch in batches), 4),
        "padding_tokens": round(1 - tokens / sum(b.tokens.layout.rows for b in batches), 4),
        "peak_bytes": "" if timed.peak_bytes is None else timed.peak_bytes,
        "mfu": "" if peak is None else round(useful / peak, 4),
        "tflops_useful": round(useful / 1e12, 4),
        "graph": config.training.cuda_graph and system == "packed_static",
        **provenance(device),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = _parser().parse_args(arguments)
    everything = Setup.of(options)
    failed = 0
    for system in options.systems:
        setup = everything.with_graph(options.graph and system == "packed_static")
        try:
            if options.profile is not None:
                trace = record(system, setup, options.steps, options.profile)
                sys.stdout.write(f"{system}: {trace}\n")
                continue
            one = run_system(system, setup, options.steps)
        except (ImportError, ValueError, torch.OutOfMemoryError, OutOfMemory) as error:
            failed += 1
            sys.stderr.write(f"bench_training: {system}: {str(error).splitlines()[0]}\n")
            continue
        _show(one)
        if options.output is not None:
            rows.append(options.output, COLUMNS, one)
    return 1 if failed else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `Setup.of` reads."""
    parser.add_argument("--model", choices=["small", *PRESETS])
    parser.add_argument("--frame-budget", type=int, help="12000 on a GPU, 400 on a CPU")
    parser.add_argument("--utterances", type=int, default=4000, help="of the corpus")
    parser.add_argument("--longest", type=float, default=30.0, help="seconds of an utterance")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--graph", action="store_true", help="packed_static as a CUDA graph")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="record, instead of timing")
    parser.add_argument("--output", type=Path, help="CSV to append to")
    return parser


def _show(one: dict[str, Any]) -> None:
    mfu = f"  MFU {100 * one['mfu']:.1f} %" if one["mfu"] != "" else ""
    peak = f"  {one['peak_bytes'] / 1e9:.1f} GB" if one["peak_bytes"] != "" else ""
    sys.stdout.write(
        f"{one['system']:17} {one['audio_s_per_s']:10.1f} audio s/s  {one['step_s']:.4f} s a step  "
        f"padding {100 * one['padding_frames']:.1f} % of frames, "
        f"{100 * one['padding_tokens']:.1f} % of tokens{peak}{mfu}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
