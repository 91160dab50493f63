"""Training throughput: packed against padded batches, and against transformers' Canary.

    python profiling/bench.py training [--model small canary_180m_flash canary_1b_flash ...]
        [--systems packed_static packed random ...] [--modes eager graph compile graph_compile]
        [--frame-budget N] [--steps 20] [--output CSV]

Audio is noise and texts are random tokens at durations of a list of real ones; no system computes
more frames a step than the budget, padding included. ``packed_static`` fills a static shape,
``packed`` has no tails; ``random``, ``bucketed``, ``sync_bucketed`` and ``sync_bucketed_2d`` are
batches of other toolkits, computed padded; ``transformers`` trains Hugging Face's Canary with the
same weights, batches (of ``random``), loss and optimizer, or its Whisper on windows of 30 s, once
both models have given the same loss. ``--modes`` is for ``packed_static``; ``graph_torch`` has the
optimizer of PyTorch, with launches for clipping and casts of their own, ``graph_apex`` apex's, and
``graph_narrow`` a residual stream in the dtype of the products. On a CPU systems take turns, a step
each; on a GPU, and with several models or modes, each has a process of its own. The steps of a row
are spread over an epoch by the length of their utterances: its throughput is that of all of them,
its time the median of a step, on a GPU from the end of one to the end of the next, as the host of a
run is ahead. --profile DIR records steps for ``profiling/report.py``, which has
the time by category of kernel, in place of timing.
Needs torch and triton alone, but for the bucketed systems, which are lhotse's, and transformers.
Exit code 1: something failed; 3: nothing could be measured here.
"""

import argparse
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import gpu_processes
import torch

from benchmarks import harness
from benchmarks.harness import LEFT_OUT, complain
from benchmarks.speech import (
    EOS,
    MODELS,
    PAD,
    Corpus,
    Effasr,
    Transformers,
    batches_of,
    padded_features,
    random_model,
    transformers_model,
)
from effasr.config import from_mapping
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import collate
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.cost import cost_model
from effasr.model.presets import PRESET_VOCABULARIES, PRESETS
from effasr.optim.adamw import OptimizerConfig
from effasr.training.config import LoopConfig, TrainConfig, resolve_losses
from effasr.training.fault_tolerance.oom_recovery import OutOfMemory
from effasr.training.flops import peak_flops, work_of
from effasr.training.step import StepReport

STATIC = "packed_static"  # with static shapes, which graphs and compilation need
SYSTEMS = (
    *(STATIC, "packed", "random", "bucketed", "sync_bucketed", "sync_bucketed_2d", "transformers"),
)
MODES = ("eager", "graph", "compile", "graph_compile", "graph_torch", "graph_apex", "graph_narrow")
COLUMNS = (
    *("system", "model", "mode", "precision", "threads", "frame_budget", "utterances", "audio_s"),
    *("step_s", "p20_s", "p80_s", "audio_s_per_s", "padding_frames", "padding_tokens"),
    *("peak_bytes", "mfu", "tflops_useful", "loss_difference", "graph", "compile"),
    *harness.VERSIONS,
)
_PREFIX = "bench training: "
_LEAST_S = 60.0


# Models that a CPU trains in seconds a step, and their vocabularies.
CPU_MODELS: dict[str, tuple[ModelConfig, int]] = {
    name: (from_mapping(ModelConfig, fields["model"]), fields["vocabulary"])
    for name, fields in MODELS["training"].items()
}


@dataclass(frozen=True)
class Setup:
    config: TrainConfig
    classes: int
    corpus: Corpus
    shape: StaticShape
    device: torch.device
    mode: str = "auto"  # of `MODES` after `with_mode`

    @classmethod
    def of(cls, options: argparse.Namespace, model: str | None = None) -> "Setup":
        """Read the options of `add_options`; without a model, that of the device."""
        device = harness.default_device()
        on_gpu = device.type == "cuda"
        name = model or ("canary_180m_flash" if on_gpu else "small")
        presets = CPU_MODELS | {x: (PRESETS[x], PRESET_VOCABULARIES[x]) for x in PRESETS}
        model_config, classes = presets[name]
        budget = options.frame_budget or (12_000 if on_gpu else 400)
        framing = model_config.features.framing
        # Half a second short, since frames are rounded up.
        longest = min(options.longest, framing.seconds * budget - 0.5)
        corpus = Corpus.of(options.utterances, classes, longest, framing)
        precision = options.precision or ("bfloat16" if on_gpu else "float32")
        config = TrainConfig(
            name=name,
            model=model_config,
            loss=resolve_losses(TrainConfig().loss, model_config),
            optimizer=OptimizerConfig(lr=1e-5),
            training=LoopConfig(precision=precision, ema_decay=None),
        )
        return cls(config, classes, corpus, corpus.shape(budget), device)

    @cached_property
    def model(self) -> ASRModel:
        """On the host, with the weights that training begins with."""
        return random_model(self.config.model, self.classes, self.device).cpu()

    def with_mode(self, mode: str) -> "Setup":
        """Return the same, whose micro-batches are a CUDA graph, compiled, both, or neither."""
        modes = {"cuda_graph": "graph" in mode, "compile": "compile" in mode}
        training = replace(self.config.training, **modes)
        optimizer, model = self.config.optimizer, self.config.model
        if mode.endswith(("torch", "apex")):
            optimizer = replace(optimizer, implementation=mode.removeprefix("graph_"))
        if mode.endswith("narrow"):
            model = replace(model, residual_in_fp32=False)
        config = replace(self.config, model=model, training=training, optimizer=optimizer)
        return replace(self, config=config, mode=mode)

    def batches(self, system: str, count: int) -> list[Batch]:
        made = batches_of(system, self.corpus, self.shape, count)
        return [batch.pin_memory() if self.device.type == "cuda" else batch for batch in made]

    def copy(self) -> ASRModel:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        model = ASRModel.from_state_dict(self.model.config, self.model.vocab_size, state)
        return model.to(self.device).train()


def transformers_of(setup: Setup, model: ASRModel, precision: str) -> Transformers:
    features = model.config.features

    def padded(audio: Sequence[Any]) -> dict[str, torch.Tensor]:
        if features.kind == "whisper":
            from transformers import WhisperFeatureExtractor

            extract = WhisperFeatureExtractor(feature_size=features.mel_bins)
            made = extract(list(audio), sampling_rate=16_000, return_tensors="pt")
            return {"input_features": made.input_features}
        computed = padded_features(features, audio, setup.device)
        return {name: value.cpu() for name, value in computed.items()}

    return Transformers(
        transformers_model(model, setup.device),
        padded,
        setup.config.optimizer,
        setup.device,
        clip=setup.config.training.clip,
        bfloat16=precision == "bfloat16",
    )


def loss_difference(setup: Setup, model: ASRModel) -> float:
    """Return the relative difference of the two models' losses on a few utterances.

    Without dropout and SpecAugment, and with the silence that Whisper's peer computes.
    """
    dropouts = ("input_dropout", "residual_dropout", "activation_dropout", "attention_dropout")
    off = dict.fromkeys(dropouts, 0.0)
    config = model.config
    assert config.decoder is not None
    silence = 30.0 if config.features.kind == "whisper" else config.features.minimum_s
    config = replace(
        config,
        features=replace(config.features, minimum_s=silence),
        spec_augment=replace(config.spec_augment, freq_masks=0, time_masks=0),
        encoder=replace(config.encoder, **off),
        decoder=replace(config.decoder, **off),
    )
    plain = ASRModel.from_state_dict(config, model.vocab_size, model.state_dict())
    examples = [setup.corpus.example(index) for index in range(4)]
    batch = collate(examples, eos_id=EOS, pad_id=PAD, framing=config.features.framing)
    batch = batch.to(setup.device)
    # Convolutions would be rounded to TF32 by default.
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        ours = float(plain.eval()(batch).cross_entropy / batch.num_targets)
        peer = transformers_of(setup, plain, "float32")
        peer.model.eval()
        theirs = sum(
            float(peer.loss(peer.inputs([example]))) * (len(example.text) + 1)
            for example in examples
        )
    return abs(theirs / batch.num_targets / ours - 1)


@dataclass(frozen=True)
class Prepared:
    system: str
    setup: Setup
    batches: list[Batch]  # of each step, with those before the clock starts
    step: Callable[[int], object]
    fields: dict[str, Any]  # that are known of its row

    @classmethod
    def of(cls, system: str, setup: Setup, steps: int, warm: int) -> "Prepared":
        """Build the model and the batches; the last ``warm`` of them also come first, untimed."""
        timed = setup.batches(system, steps)
        batches = timed[steps - warm :] + timed
        model = setup.copy()
        fields: dict[str, Any] = {"frame_budget": setup.shape.frame_budget}
        if system != "transformers":
            trainer = Effasr(setup.config, model, setup.device)
            step = lambda number: trainer.step(number, batches[number])
            return cls(system, setup, batches, step, fields)
        fields["loss_difference"] = loss_difference(setup, model)
        if fields["loss_difference"] > 1e-3:
            raise ValueError(f"the losses differ by {fields['loss_difference']:.2g}: not timed")
        peer = transformers_of(setup, model, setup.config.training.precision)
        examples = [[setup.corpus.example(int(name)) for name in batch.ids] for batch in batches]
        inputs = [peer.inputs(chosen) for chosen in examples]
        return cls(system, setup, batches, lambda number: peer.step(inputs[number]), fields)


def measured(prepared: Sequence[Prepared], steps: int) -> Iterator[dict[str, Any]]:
    """Yield the row of each system; they take turns, and the first steps are not counted."""
    warm = len(prepared[0].batches) - steps
    device = prepared[0].setup.device
    seconds: list[list[float]] = [[] for _ in prepared]
    reports: list[object] = []
    peak = None
    if device.type == "cuda":
        (system,) = prepared  # whose peak memory is measured
        queue = lambda number: reports.append(system.step(number))
        times, peak = harness.in_sequence(queue, warm + steps, device)
        seconds[0] = times[warm - 1 :]
    else:
        for turn in harness.in_turns([system.step for system in prepared], warm + steps, device):
            if turn.number >= warm:
                seconds[turn.system].append(turn.seconds)
    if any(isinstance(x, StepReport) and x.read()["splits"] for x in reports):
        # The time of a batch in parts would not be that of the batch.
        raise ValueError("a micro-batch did not fit in memory whole: lower the budget.")
    for system, times in zip(prepared, seconds, strict=True):
        yield row_of(system, warm, times, peak)


def row_of(
    system: Prepared, warm: int, times: Sequence[float], peak_bytes: int | None
) -> dict[str, Any]:
    setup, batches, config = system.setup, system.batches[warm:], system.setup.config
    # Of all steps together, as an epoch takes them: long utterances are not as fast as short ones.
    seconds = math.fsum(times)
    audio = [batch.audio_seconds for batch in batches]
    useful = work_of(batches, cost_model(config.model, setup.classes))[0] / seconds
    p20, p50, p80 = harness.percentiles(times)
    peak = peak_flops(setup.device)
    frames, tokens = (sum(getattr(b, f"num_{x}") for b in batches) for x in ("frames", "tokens"))
    on_cpu = setup.device.type == "cpu"
    return {
        "system": system.system,
        "model": config.name,
        "mode": setup.mode,
        "precision": config.training.precision,
        "threads": torch.get_num_threads() if on_cpu else "",
        "utterances": round(statistics.mean(len(batch.ids) for batch in batches), 1),
        "audio_s": round(statistics.mean(audio), 2),
        **{"step_s": round(p50, 5), "p20_s": round(p20, 5), "p80_s": round(p80, 5)},
        "audio_s_per_s": round(sum(audio) / seconds, 1),
        "padding_frames": round(1 - frames / sum(batch.frames.rows for batch in batches), 4),
        "padding_tokens": round(1 - tokens / sum(b.tokens.layout.rows for b in batches), 4),
        "peak_bytes": "" if peak_bytes is None else peak_bytes,
        "mfu": "" if peak is None else round(useful / peak, 4),
        "tflops_useful": round(useful / 1e12, 4),
        "loss_difference": "",
        "graph": config.training.cuda_graph is True,
        "compile": config.training.compile,
        **system.fields,
        **harness.provenance(setup.device),
    }


# --- jobs: an error of one ends no other ----------------------------------------------------------


@dataclass(frozen=True)
class Job:
    model: str | None  # None for the one of the device
    system: str
    mode: str = "eager"

    @property
    def name(self) -> str:
        mode = "" if self.mode == "eager" else f" {self.mode}"
        return f"{self.model or ''} {self.system}{mode}".strip()


@dataclass(frozen=True)
class Verdict:
    job: Job
    status: str = "ok"  # or "left out", or "failed"
    reason: str = ""

    def line(self) -> str:
        return f"{_PREFIX}{self.job.name}: {self.status}: {self.reason}"


def jobs(models: Sequence[str | None], systems: Sequence[str], modes: Sequence[str]) -> list[Job]:
    """Return the modes of static batches for each model, then the other systems, eager."""
    static = [Job(model, STATIC, mode) for model in models for mode in modes if STATIC in systems]
    eager = [Job(model, system) for model in models for system in systems if system != STATIC]
    return [*static, *(eager if "eager" in modes else ())]


def run_apart(
    chosen: Sequence[Job],
    command: Callable[[Job], Sequence[str]],
    *,
    budget_s: float | None = None,
    case_s: float | None = None,
) -> list[Verdict]:
    """Run each job in a process of its own, one after the other; their output is shown.

    `budget_s` is for all, and jobs that it does not reach fail; `case_s` is for each, by default a
    generous share of what remains of the budget.
    """
    end = None if budget_s is None else time.monotonic() + budget_s
    verdicts = []
    with gpu_processes.sigterm_as_exit():
        for number, job in enumerate(chosen):
            limit = math.inf if case_s is None else case_s
            if end is not None:
                remaining = end - time.monotonic()
                if remaining <= 0:
                    verdicts.append(Verdict(job, "failed", "no time left of the budget"))
                    continue
                # More than an equal share: the first ones, which matter most, also compile for the
                # others.
                share = max(_LEAST_S, 2.5 * remaining / (len(chosen) - number))
                limit = min(remaining, share if case_s is None else case_s)
            ended = gpu_processes.run(command(job), seconds=limit, echo=sys.stdout.write)
            verdicts.append(_verdict(job, ended))
    return verdicts


def _verdict(job: Job, ended: gpu_processes.Ended) -> Verdict:
    if ended.code == 0:
        return Verdict(job)
    status = "left out" if ended.code == LEFT_OUT else "failed"
    prefix = Verdict(job, status).line()
    lines = [line.removeprefix(prefix) for line in ended.lines if line.startswith(prefix)]
    return Verdict(job, status, lines[-1] if lines and ended.code is not None else ended.reason)


def summarize(verdicts: Sequence[Verdict]) -> str:
    missing = [x for x in verdicts if x.status != "ok"]
    lines = [f"{x.job.name} {x.status} ({x.reason})" for x in missing]
    counted = f"{_PREFIX}{len(verdicts) - len(missing)} of {len(verdicts)} measured"
    return "; ".join([counted, *lines])


def _attempt(job: Job, action: Callable[[], None]) -> Verdict:
    try:
        action()
    except Exception as error:
        status = "left out" if isinstance(error, ImportError) else "failed"
        if not isinstance(error, ImportError | ValueError | torch.OutOfMemoryError | OutOfMemory):
            traceback.print_exc()
        # On one line: some begin with an empty one.
        text = " ".join(str(error).split())[:400]
        return Verdict(job, status, f"{type(error).__name__}: {text}")
    return Verdict(job)


def _run_here(chosen: Sequence[Job], options: argparse.Namespace, *, on_gpu: bool) -> list[Verdict]:
    """Run jobs of one model in this process; on a CPU several systems take turns."""
    verdicts: dict[Job, Verdict] = {}
    ready: dict[Job, Prepared] = {}
    setup = Setup.of(options, chosen[0].model)
    warm = min(3, options.steps)

    def prepare(job: Job) -> None:
        changed = setup.with_mode(job.mode)
        if options.profile is None:
            ready[job] = Prepared.of(job.system, changed, options.steps, warm)
            return
        if job.system == "transformers":
            raise ValueError("only our own steps have ranges to be recorded with: leave it out")
        timed = changed.batches(job.system, options.steps)
        batches = [timed[number % options.steps] for number in range(3)] + timed
        name = job.system if job.mode == "eager" else f"{job.system}_{job.mode}"
        trainer = Effasr(changed.config, changed.copy(), changed.device)
        harness.show(f"{job.system}: {trainer.record(batches, 3, options.profile / name)}")

    for job in chosen:
        if "graph" in job.mode and not on_gpu:
            reason = "`training.cuda_graph` needs a GPU, and there is none"
            verdicts[job] = Verdict(job, "left out", reason)
        else:
            verdicts[job] = _attempt(job, lambda job=job: prepare(job))

    def measure() -> None:
        for row in measured(list(ready.values()), options.steps):
            _write(row, options.output)

    if ready:
        ended = _attempt(next(iter(ready)), measure)
        verdicts |= {job: Verdict(job, ended.status, ended.reason) for job in ready}
    for verdict in verdicts.values():
        if verdict.status != "ok":
            complain(verdict.line())
    return list(verdicts.values())


def _write(row: dict[str, Any], output: Path | None) -> None:
    mfu = f"  MFU {100 * row['mfu']:.1f} %" if row["mfu"] != "" else ""
    peak = f"  {row['peak_bytes'] / 1e9:.1f} GB" if row["peak_bytes"] != "" else ""
    harness.show(
        f"{row['model']} {row['system']:17} {row['mode']:13} {row['audio_s_per_s']:10.1f} audio "
        f"s/s  {row['step_s']:.4f} s a step  padding {100 * row['padding_frames']:.1f} % of "
        f"frames, {100 * row['padding_tokens']:.1f} % of tokens{peak}{mfu}"
    )
    if output is not None:
        harness.append(output, COLUMNS, row)


def _command(job: Job, options: argparse.Namespace) -> list[str]:
    script = str(harness.PROFILING / "bench.py")
    command = [sys.executable, script, "training", "--systems", job.system, "--modes", job.mode]
    if job.model is not None:
        command += ["--model", job.model]
    shared = ("frame_budget", "precision", "utterances", "longest", "steps")
    for name in (*shared, "profile", "output"):
        value = getattr(options, name)
        if value is not None:
            command += [f"--{name.replace('_', '-')}", str(value)]
    return command


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--frame-budget", type=int, help="12000 on a GPU, 400 on a CPU")
    text = "bfloat16 on a GPU, float32 on a CPU"
    add("--precision", choices=["float32", "bfloat16"], help=text)
    add("--utterances", type=int, default=40_000, help="of the corpus")
    add("--longest", type=float, default=30.0, help="seconds of an utterance")


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser("training", __doc__)
    add_options(parser)
    add = parser.add_argument
    add("--model", nargs="+", choices=[*CPU_MODELS, *PRESETS])
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    add("--modes", nargs="+", choices=MODES, default=["eager"])
    add("--steps", type=int, default=20)
    add("--profile", type=Path, metavar="DIR", help="record, instead of timing")
    add("--budget-s", type=float, help="for all, where each has a process")
    add("--case-s", type=float, help="for each of them; else by the budget")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    chosen = jobs(options.model or [None], options.systems, options.modes)
    if not chosen:
        parser.error(f"--modes without eager are for {STATIC} alone: add it to --systems")
    if options.profile is not None and len(options.model or []) > 1:
        parser.error("--profile records one --model at a time")
    on_gpu = torch.cuda.is_available()
    several = len({(job.model, job.mode) for job in chosen}) > 1
    if len(chosen) > 1 and (on_gpu or several):
        limits = {"budget_s": options.budget_s, "case_s": options.case_s}
        verdicts = run_apart(chosen, lambda job: _command(job, options), **limits)
    else:
        verdicts = _run_here(chosen, options, on_gpu=on_gpu)
    if len(chosen) > 1:
        harness.show(summarize(verdicts))
    statuses = {verdict.status for verdict in verdicts}
    if statuses == {"left out"}:
        return LEFT_OUT
    return 1 if "failed" in statuses else 0
