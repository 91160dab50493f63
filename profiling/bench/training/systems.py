"""The systems whose training is timed: ours, and Hugging Face's Canary or Whisper."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.peer_features import parakeet_features
from bench.training.corpus import EOS, PAD, Workload
from effasr import ranges
from effasr.data.batch import IGNORED, Batch
from effasr.data.collate import Example, collate
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.training.build import build_train_state
from effasr.training.config import TrainConfig
from effasr.training.profiler import ProfileConfig, StepProfiler
from effasr.training.step import StepReport, train_step


@dataclass(frozen=True)
class Timed:
    """Measurements of the steps of a system.

    Attributes:
        seconds: Seconds of each step.
        peak_bytes: The most memory that the GPU held; None on a CPU.
    """

    seconds: list[float]
    peak_bytes: int | None


Step = Callable[[int], object]
"""Makes the update of the batch of this number."""


def time_in_turns(
    systems: Sequence[Step], steps: int, warm: int, device: torch.device
) -> list[Timed]:
    """Time the steps of systems that take turns, after some steps that are not counted.

    The load of the machine changes over minutes; taking turns, all systems see the same.

    Args:
        systems: The steps of each; on a GPU one, whose peak memory is then measured.
        steps: Timed steps of each system.
        warm: Steps of each before them.
        device: Device of all of them.
    """

    def wait() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    if device.type == "cuda":
        assert len(systems) == 1
        torch.cuda.reset_peak_memory_stats(device)
    times: list[list[float]] = [[] for _ in systems]
    for number in range(warm + steps):
        for step, taken in zip(systems, times, strict=True):
            began = wait()
            step(number)
            taken.append(wait() - began)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return [Timed(taken[warm:], peak) for taken in times]


class Effasr:
    """Our trainer, on batches that are already there."""

    def __init__(self, config: TrainConfig, model: ASRModel, device: torch.device) -> None:
        context = DistributedContext(0, 1, device)
        self._train_state = build_train_state(config, model, context)
        self._device = device

    def steps(self, batches: Sequence[Batch]) -> Step:
        """Return steps on these batches, in the form for `time_in_turns`.

        They raise ValueError for a batch that did not fit in memory whole: its time would be that
        of its parts.
        """

        def step(number: int) -> None:
            if self.step(number, batches[number]).read()["splits"]:
                raise ValueError("a micro-batch did not fit in memory whole: lower --frame-budget.")

        return step

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
    """Hugging Face's model with the weights of ours, trained as its users train it.

    That is Canary, on batches padded to their longest utterance, or Whisper, on windows of 30 s.
    """

    def __init__(self, config: TrainConfig, model: ASRModel, device: torch.device) -> None:
        import transformers

        from effasr.interop.huggingface.checkpoint import export_model

        transformers.utils.logging.disable_progress_bar()
        self._features = model.config.features
        self._whisper = self._features.kind == "whisper"
        kind = (
            transformers.WhisperForConditionalGeneration
            if self._whisper
            else transformers.CanaryForConditionalGeneration
        )
        with tempfile.TemporaryDirectory() as folder:
            export_model(model, folder)
            loaded: Any = kind.from_pretrained(folder)
        self._model = loaded.to(device).train()
        self._device = device
        self._config = config
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=config.optimizer.lr,
            betas=config.optimizer.betas,
            weight_decay=config.optimizer.weight_decay,
            fused=True,
        )

    def inputs(self, examples: Sequence[Example]) -> dict[str, Any]:
        """Padded features, prompts with texts, and targets, on the host as ours are."""
        tokens = [torch.tensor(example.prompt + example.text) for example in examples]
        targets = [
            torch.tensor([IGNORED] * (len(example.prompt) - 1) + [*example.text, EOS])
            for example in examples
        ]
        pad = nn.utils.rnn.pad_sequence
        made = {
            **self._padded_features([example.audio for example in examples]),
            "decoder_input_ids": pad(tokens, batch_first=True, padding_value=PAD),
            "labels": pad(targets, batch_first=True, padding_value=IGNORED),
        }
        if not self._whisper:
            mask = [torch.ones(len(row), dtype=torch.long) for row in tokens]
            made["decoder_attention_mask"] = pad(mask, batch_first=True)
        if self._device.type == "cuda":
            made = {name: value.pin_memory() for name, value in made.items()}
        return made

    def _padded_features(self, audio: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        if not self._whisper:
            computed = parakeet_features(self._features, audio, self._device)
            return {name: value.cpu() for name, value in computed.items()}
        from transformers import WhisperFeatureExtractor

        extract = WhisperFeatureExtractor(feature_size=self._features.mel_bins)
        made = extract(list(audio), sampling_rate=16_000, return_tensors="pt")
        return {"input_features": made.input_features}

    def loss(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Mean cross-entropy of the targets."""
        moved = {name: value.to(self._device, non_blocking=True) for name, value in inputs.items()}
        labels = moved.pop("labels")
        half = self._config.training.precision == "bfloat16"
        with torch.autocast(self._device.type, torch.bfloat16, enabled=half):
            logits = self._model(**moved).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    def steps(self, inputs: Sequence[dict[str, Any]]) -> Step:
        """Return steps on these batches, in the form for `time_in_turns`."""

        def step(number: int) -> None:
            self.loss(inputs[number]).backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), self._config.training.clip)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

        return step


def without_chance(config: ModelConfig) -> ModelConfig:
    """Return the same without dropout and SpecAugment, and with the silence of Whisper's peer."""
    off = {
        name: 0.0
        for name in ("input_dropout", "residual_dropout", "activation_dropout", "attention_dropout")
    }
    assert config.decoder is not None
    silence = 30.0 if config.features.kind == "whisper" else config.features.minimum_s
    return replace(
        config,
        features=replace(config.features, minimum_s=silence),
        spec_augment=replace(config.spec_augment, freq_masks=0, time_masks=0),
        encoder=replace(config.encoder, **off),
        decoder=replace(config.decoder, **off),
    )


def loss_difference(
    config: TrainConfig, model: ASRModel, workload: Workload, device: torch.device
) -> float:
    """Return the relative difference of the two models' losses on a few utterances."""
    plain = ASRModel.from_state_dict(
        without_chance(model.config), model.vocab_size, model.state_dict()
    )
    examples = [workload.example(index) for index in range(4)]
    framing = plain.config.features.framing
    batch = collate(examples, eos_id=EOS, pad_id=PAD, framing=framing).to(device)
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
