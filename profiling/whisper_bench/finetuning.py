"""Fine-tuning steps: forward, backward, clipping and AdamW."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from bench.training.systems import Effasr
from torch import nn

from effasr.data.batch import IGNORED
from effasr.data.collate import Example
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training.config import LoopConfig, TrainConfig, resolve_losses
from effasr.training.loss import LossConfig
from whisper_bench.checkpoint import EOS
from whisper_bench.corpus import Corpus, packed
from whisper_bench.models import effasr_model, feature_extractor, transformers_model
from whisper_bench.settings import Settings
from whisper_bench.system import resident_bytes

_CPU = torch.device("cpu")
_CHECKED = 4
"""Utterances whose loss is compared before the first step."""
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.0)
"""Values of recipes/finetune_whisper.yaml, with a rate at which three updates change the loss."""


class TransformersSteps:
    """transformers' Whisper as its users fine-tune it; features are ready before the clock starts.

    Its own loss, with labels for the same targets as effasr's: the text and its end.
    """

    def __init__(self, settings: Settings, system: str) -> None:
        del system
        import transformers
        from transformers import WhisperForConditionalGeneration  # noqa: F401

        self.base_bytes, self.version = resident_bytes(), f"transformers {transformers.__version__}"
        self._corpus = Corpus.of(settings)
        self._plan = self._corpus.random_batches()
        self._model = transformers_model(settings)
        self._extract = feature_extractor(settings)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(),
            lr=OPTIMIZER.lr,
            betas=OPTIMIZER.betas,
            eps=OPTIMIZER.eps,
            weight_decay=OPTIMIZER.weight_decay,
            fused=True,
        )

    @torch.no_grad()
    def check(self) -> dict[str, Any]:
        """Return the loss of some utterances."""
        self._model.eval()
        examples = self._corpus.examples(self._plan[0][:_CHECKED])
        return {"loss": float(self._model(**self._inputs(examples)).loss)}

    def run(self, number: int) -> dict[str, Any]:
        """Make an update."""
        examples = self._corpus.examples(self._plan[number % len(self._plan)])
        inputs = self._inputs(examples)
        self._model.train()
        began = time.perf_counter()
        loss = self._model(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), LoopConfig().clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - began
        frames = len(examples) * inputs["input_features"].shape[-1] // 2
        done = {"seconds": seconds, "frames": frames, "loss": loss.item()}
        return done | self._corpus.step_means(self._plan)

    def _inputs(self, examples: Sequence[Example]) -> dict[str, torch.Tensor]:
        audio = [example.audio for example in examples]
        made = self._extract(audio, sampling_rate=16_000, return_tensors="pt")
        read = [torch.tensor(example.prompt + example.text) for example in examples]
        targets = [
            torch.tensor([IGNORED] * (len(example.prompt) - 1) + [*example.text, EOS])
            for example in examples
        ]
        pad = nn.utils.rnn.pad_sequence
        return {
            "input_features": made.input_features,
            "decoder_input_ids": pad(read, batch_first=True, padding_value=EOS),
            "labels": pad(targets, batch_first=True, padding_value=IGNORED),
        }


class EffasrSteps:
    """effasr's trainer on packed batches of a static shape; features are a part of the step."""

    def __init__(self, settings: Settings, system: str) -> None:
        self.base_bytes, self.version = resident_bytes(), "effasr"
        model = effasr_model(settings, settings.minimum_s(system))
        self._corpus = Corpus.of(settings)
        self._packed = packed(system, self._corpus, model.config, model.vocab_size)
        config = TrainConfig(
            model=model.config,
            loss=resolve_losses(LossConfig(label_smoothing=0.0), model.config),
            optimizer=OPTIMIZER,
            # The peak throughout, as transformers' optimizer has it without a schedule.
            schedule=ScheduleConfig(name="flat_cosine", warmup_steps=0, flat_fraction=1.0),
            training=LoopConfig(precision="float32", device="cpu"),
        )
        self._model = model
        self._steps = Effasr(config, model, _CPU)

    @torch.no_grad()
    def check(self) -> dict[str, Any]:
        """Return the loss of the utterances that transformers is asked for."""
        self._model.eval()
        first = self._corpus.random_batches()[0][:_CHECKED]
        # A batch of its own shape: these may not fit into the static one.
        batch = self._packed.of(self._corpus.examples(first), static=False)
        loss = float(self._model(batch).cross_entropy) / batch.num_targets
        self._model.train()
        return {"loss": loss}

    def run(self, number: int) -> dict[str, Any]:
        """Make an update.

        Raises:
            ValueError: The batch did not fit into memory whole.
        """
        batch = self._packed.collated(number)
        began = time.perf_counter()
        figures = self._steps.step(number, batch).read()
        seconds = time.perf_counter() - began
        if figures["splits"]:
            raise ValueError("a micro-batch did not fit in memory whole: lower --batch.")
        done = {"seconds": seconds, "frames": batch.frames.rows, "loss": figures["loss"]}
        return done | self._corpus.step_means(self._packed.plan)
