"""The systems whose training is timed: ours, and Hugging Face's Canary."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.peer_features import parakeet_features
from bench.training.corpus import EOS, PAD, Workload
from effasr import ranges
from effasr.data.batch import IGNORED, Batch
from effasr.data.collate import Example, collate
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel, ModelConfig
from effasr.training.build import build_train_state
from effasr.training.config import TrainConfig
from effasr.training.profiler import ProfileConfig, StepProfiler
from effasr.training.step import StepReport, train_step


@dataclass(frozen=True)
class Timed:
    """What the steps of a system took.

    Attributes:
        seconds: Seconds of each step.
        peak_bytes: The most memory that the GPU held; None on a CPU.
    """

    seconds: list[float]
    peak_bytes: int | None


def time_steps(step: Callable[[int], object], steps: int, warm: int, device: torch.device) -> Timed:
    """Time each step, after some that are not counted."""

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for number in range(warm + steps):
        began = wait()
        step(number)
        times.append(wait() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Timed(times[warm:], peak)


class Effasr:
    """Our trainer, on batches that are already there."""

    def __init__(self, config: TrainConfig, model: ASRModel, device: torch.device) -> None:
        context = DistributedContext(0, 1, device)
        self._train_state = build_train_state(config, model, context)
        self._device = device

    def time(self, batches: Sequence[Batch], warm: int) -> Timed:
        """Time a step on each batch after the first ``warm``.

        Raises:
            ValueError: A batch did not fit in memory whole: its time would be that of pieces.
        """
        reports: list[StepReport] = []
        timed = time_steps(
            lambda number: reports.append(self.step(number, batches[number])),
            len(batches) - warm,
            warm,
            self._device,
        )
        if any(report.values.read()[-1] for report in reports):
            raise ValueError("a micro-batch did not fit in memory whole: lower --frame-budget.")
        return timed

    def step(self, number: int, batch: Batch) -> StepReport:
        """Make one update."""
        return train_step(self._train_state, [batch], number)

    def record(self, batches: Sequence[Batch], warm: int, folder: Path) -> Path:
        """Let torch's profiler record a step on each batch after the first ``warm``.

        Returns:
            The trace, which ``profiling/report.py`` reads.
        """
        wanted = ProfileConfig(tool="kineto", first_step=warm, steps=len(batches) - warm)
        with closing(StepProfiler(wanted, self._train_state.context, folder)) as capture:
            for number, batch in enumerate(batches):
                with capture.step(number), ranges.range("step", number):
                    self.step(number, batch)
        return folder / "rank0.json.gz"


class Transformers:
    """Hugging Face's Canary with the weights of ours, trained as its users train it."""

    def __init__(self, config: TrainConfig, model: ASRModel, device: torch.device) -> None:
        from transformers import CanaryForConditionalGeneration

        from effasr.interop.huggingface.checkpoint import export_canary

        with tempfile.TemporaryDirectory() as folder:
            export_canary(model, folder)
            loaded: Any = CanaryForConditionalGeneration.from_pretrained(folder)
        self._model = loaded.to(device).train()
        self._device = device
        self._config = config
        self._features = model.config.features
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=device.type == "cuda",
        )

    def inputs(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Padded features, prompts with texts, and targets, on the host as ours are."""
        computed = parakeet_features(
            self._features, [example.audio for example in examples], self._device
        )
        features = {name: value.cpu() for name, value in computed.items()}
        tokens = [torch.tensor(example.prompt + example.text) for example in examples]
        targets = [
            torch.tensor([IGNORED] * (len(example.prompt) - 1) + [*example.text, EOS])
            for example in examples
        ]
        pad = nn.utils.rnn.pad_sequence
        mask = [torch.ones(len(row), dtype=torch.long) for row in tokens]
        made = {
            **features,
            "decoder_input_ids": pad(tokens, batch_first=True, padding_value=PAD),
            "decoder_attention_mask": pad(mask, batch_first=True),
            "labels": pad(targets, batch_first=True, padding_value=IGNORED),
        }
        if self._device.type == "cuda":
            made = {name: value.pin_memory() for name, value in made.items()}
        return made

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Mean cross-entropy of the targets."""
        moved = {name: value.to(self._device, non_blocking=True) for name, value in inputs.items()}
        labels = moved.pop("labels")
        half = self._config.training.precision == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=half):
            logits = self._model(**moved).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    def time(self, inputs: Sequence[dict[str, Any]], warm: int) -> Timed:
        """Time a step on each batch after the first ``warm``."""

        def step(number: int) -> None:
            self.loss(inputs[number]).backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), self._config.training.clip)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

        return time_steps(step, len(inputs) - warm, warm, self._device)


def without_chance(config: ModelConfig) -> ModelConfig:
    """Return the same without dropout and SpecAugment, so that losses can be compared."""
    off = {
        name: 0.0
        for name in ("input_dropout", "residual_dropout", "activation_dropout", "attention_dropout")
    }
    assert config.decoder is not None
    return replace(
        config,
        spec_augment=replace(config.spec_augment, freq_masks=0, time_masks=0),
        encoder=replace(config.encoder, **off),
        decoder=replace(config.decoder, **off),
    )


def loss_difference(
    config: TrainConfig, model: ASRModel, workload: Workload, device: torch.device
) -> float:
    """How far the two models' losses are apart on a few utterances, as a part of the loss."""
    plain = ASRModel.from_state_dict(
        without_chance(model.config), model.vocab_size, model.state_dict()
    )
    examples = [workload.example(index) for index in range(4)]
    batch = collate(examples, eos_id=EOS, pad_id=PAD).to(device)
    # Convolutions would be rounded to TF32 by default.
    flags = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    with torch.no_grad(), flags:
        ours = float(plain.eval()(batch).cross_entropy / batch.num_targets)
        single = replace(config, training=replace(config.training, precision="float32"))
        peer = Transformers(single, plain, device)
        peer._model.eval()
        theirs = sum(
            float(peer.loss(peer.inputs([example]))) * (len(example.text) + 1)
            for example in examples
        )
    return abs(theirs / batch.num_targets / ours - 1)
