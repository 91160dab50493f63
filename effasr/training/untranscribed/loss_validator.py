"""Validation of pretraining: the loss on audio that the encoder was not trained on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from lhotse.cut import Cut

from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.batch import Batch
from effasr.data.collate import Example, collate
from effasr.data.manifest.reader import iterate
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.evaluate import shard
from effasr.evaluation.result import free_set_name
from effasr.model.asr import ASRModel
from effasr.nn.parameters import evaluating
from effasr.training.config import TrainConfig

log = logging.getLogger(__name__)

_SEED = 0
"""Seed of the masks, which are the same in every validation."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """Loss on a validation set, over all ranks.

    Attributes:
        total: Sum over the frames, in nats.
        frames: Encoder frames.
        failed: Utterances whose audio could not be read.
    """

    total: float
    frames: int
    failed: int = 0

    @property
    def loss(self) -> float:
        """Cross-entropy of a masked frame, in nats; NaN without frames."""
        return self.total / self.frames if self.frames else float("nan")


class LossValidator:
    """Computes the loss of BEST-RQ on the validation sets, with the current weights of a model.

    Utterances that are longer than the frame budget are left out.

    Raises:
        ValueError: A manifest cannot be read or has nothing that fits: raised before training
            starts.
    """

    def __init__(self, config: TrainConfig, model: ASRModel, context: DistributedContext) -> None:
        self._model, self._context = model, context
        self._budget = config.data.known_frame_budget
        self._precision = config.evaluation.decoding.precision
        self._framing = model.config.features.framing
        self._sets: dict[str, list[Cut]] = {}
        for path in config.data.validation:
            every = iterate(path, language=config.data.language, untranscribed=True)
            cuts = list(islice(every, config.evaluation.max_utterances))
            cuts = [cut for cut in cuts if 0 < self._frames(cut) <= self._budget]
            if not cuts:
                raise ValueError(f"{path}: holds no utterance within data.frame_budget.")
            name = free_set_name(path, self._sets)
            self._sets[name] = shard(cuts, context.rank, context.size)

    def __call__(self) -> dict[str, LossResult]:
        """Return the loss on each set; all ranks call this."""
        return {name: self._evaluate(cuts) for name, cuts in self._sets.items()}

    def _frames(self, cut: Cut) -> int:
        rate = self._model.config.features.sample_rate
        return self._framing.frames(round(cut.duration * rate))

    @torch.no_grad()
    def _evaluate(self, cuts: Sequence[Cut]) -> LossResult:
        device = next(self._model.parameters()).device
        devices = [device] if device.type == "cuda" else []
        half, total, frames = self._precision == "bfloat16", 0.0, 0
        failed: list[str] = []
        with evaluating(self._model), torch.random.fork_rng(devices):
            torch.manual_seed(_SEED)
            for batch in self._batches(cuts, failed):
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    losses = self._model.forward(batch.to(device))
                total += float(losses.cross_entropy)
                frames += batch.num_targets
        parts = self._context.all_gather((total, frames, len(failed)))
        totals, counts, failures = zip(*parts, strict=True)
        return LossResult(sum(totals), sum(counts), sum(failures))

    def _batches(self, cuts: Sequence[Cut], failed: list[str]) -> Iterator[Batch]:
        """Yield batches of at most the frame budget, in order; add to ``failed`` what has none."""
        group: list[Example] = []
        filled = 0
        for cut in cuts:
            try:
                audio = load_audio(cut, self._model.config.features.sample_rate)
            except AudioError as error:
                log.warning("validation leaves out %s: %s", cut.id, error)
                failed.append(cut.id)
                continue
            frames = self._framing.frames(len(audio))
            if group and filled + frames > self._budget:
                yield self._collated(group)
                group, filled = [], 0
            group.append(Example(cut.id, audio, [], None))
            filled += frames
        if group:
            yield self._collated(group)

    def _collated(self, examples: Sequence[Example]) -> Batch:
        return collate(examples, eos_id=0, pad_id=0, framing=self._framing)
