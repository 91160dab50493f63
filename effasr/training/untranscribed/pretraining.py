"""Pretraining with BEST-RQ: its validation, and the use of its codes."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lhotse.cut import Cut
from torch import Tensor

from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.collate import Example, collate
from effasr.data.manifest.reader import iterate
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.evaluate import shard
from effasr.evaluation.metric import BY_NAME
from effasr.evaluation.result import free_set_name
from effasr.model.asr import ASRModel
from effasr.model.best_rq import BestRQ
from effasr.nn.parameters import evaluating
from effasr.training.config import TrainConfig
from effasr.training.diagnostics.probe import groups_within
from effasr.training.fault_tolerance.stop import StopRequest
from effasr.training.validation import check_best_sets, even_sample

log = logging.getLogger(__name__)

_SEED = 0
"""Seed of the masks, which are the same in every validation."""


@dataclass(frozen=True, slots=True)
class LossResult:
    """Loss on a validation set, over all ranks."""

    # Sum over the frames, in nats.
    total: float
    frames: int
    # Utterances whose audio could not be read.
    failed: int = 0

    @property
    def loss(self) -> float:
        """Cross-entropy of a masked frame, in nats; NaN without frames."""
        return self.total / self.frames if self.frames else float("nan")


class LossValidator:
    """Computes the loss of BEST-RQ on the validation sets, with the current weights of a model.

    Utterances that are longer than the frame budget are left out.
    """

    def __init__(self, config: TrainConfig, model: ASRModel, context: DistributedContext) -> None:
        self._model, self._context = model, context
        self._budget = config.data.known_frame_budget
        self._precision = config.evaluation.decoding.precision
        self._framing = model.config.features.framing
        self._sets: dict[str, list[Cut]] = {}
        digest = hashlib.sha256(str(self._budget).encode())
        for path in config.data.validation:
            read = iterate(path, language=config.data.assumed_language, untranscribed=True)
            cuts = even_sample(read, config.evaluation.max_utterances, config.seed)
            fitting = [cut for cut in cuts if 0 < self._frames(cut) <= self._budget]
            if not fitting:
                raise ValueError(f"{path}: holds no utterance within data.frame_budget.")
            digest.update(repr([(cut.id, cut.duration) for cut in fitting]).encode())
            name = free_set_name(path, self._sets)
            self._sets[name] = shard(fitting, context.rank, context.size)
        check_best_sets(config, self._sets)
        digest.update(repr(config.evaluation.best_sets).encode())
        self.fingerprint, self.metric = digest.hexdigest(), BY_NAME["loss"]

    def __call__(self, stop: StopRequest) -> dict[str, LossResult]:
        """Return the loss on each set; all ranks call this. A stop is a StopInterrupt."""
        results = {}
        for name, cuts in self._sets.items():
            parts = stop.gather(self._context, partial(self._evaluate, cuts))
            totals, counts, failures = zip(*parts, strict=True)
            results[name] = LossResult(sum(totals), sum(counts), sum(failures))
        return results

    def _frames(self, cut: Cut) -> int:
        rate = self._model.config.features.sample_rate
        return self._framing.frames(round(cut.duration * rate))

    @torch.no_grad()
    def _evaluate(self, cuts: Sequence[Cut]) -> tuple[float, int, int]:
        device = next(self._model.parameters()).device
        devices = [device] if device.type == "cuda" else []
        half, total, frames = self._precision == "bfloat16", 0.0, 0
        failed: list[str] = []
        examples = self._examples(cuts, failed)
        with evaluating(self._model), torch.random.fork_rng(devices):
            torch.manual_seed(_SEED)
            for group in groups_within(examples, self._budget, self._framing):
                batch = collate(group, eos_id=0, pad_id=0, framing=self._framing)
                with torch.autocast(device.type, torch.bfloat16, enabled=half):
                    losses = self._model.forward(batch.to(device))
                total += float(losses.cross_entropy)
                frames += batch.num_targets
        return total, frames, len(failed)

    def _examples(self, cuts: Sequence[Cut], failed: list[str]) -> Iterator[Example]:
        for cut in cuts:
            try:
                audio = load_audio(cut, self._model.config.features.sample_rate)
            except AudioError as error:
                log.warning("validation leaves out %s: %s", cut.id, error)
                failed.append(cut.id)
                continue
            yield Example(cut.id, audio, [], None)


class CodeUse:
    """Use of the codes of BEST-RQ, in the frames that a rank has read since the last line.

    Training learns little where a few codes stand for most frames. The entropy of the codes is in
    nats; its exponential, the perplexity, is the number of equally frequent codes with the same
    entropy.
    """

    def __init__(self, best_rq: BestRQ) -> None:
        self._best_rq = best_rq

    def line(self) -> dict[str, Any]:
        entropies = entropy(self._best_rq.code_counts).tolist()
        self._best_rq.code_counts.zero_()
        fields: dict[str, Any] = {}
        for number, value in enumerate(entropies):
            fields[f"code_entropy_{number}"] = value
            fields[f"code_perplexity_{number}"] = float(torch.tensor(value).double().exp())
        return fields

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self._best_rq.code_counts.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._best_rq.code_counts.copy_(state["counts"])


def entropy(counts: Tensor) -> Tensor:
    """Return the entropy of each row of counts in nats: int64 (K, codes) to float64 (K,)."""
    total = counts.sum(-1, keepdim=True).clamp(min=1)
    shares = counts.double() / total
    return torch.special.entr(shares).sum(-1)
