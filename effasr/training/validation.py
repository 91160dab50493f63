"""Validation during training: the code of ``effasr evaluate``, split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import add

from lhotse.cut import Cut

from effasr.data.manifest.reader import iterate
from effasr.data.tokenizer import Tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.evaluate import evaluate, shard
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, merge, set_name
from effasr.model.asr import ASRModel
from effasr.training.config import TrainConfig
from effasr.training.diagnostics.probe import Probe
from effasr.training.diagnostics.probe_sums import ProbeSums
from effasr.transcription.recognizer import Recognizer


@dataclass(frozen=True, slots=True)
class SetResult:
    """Results of a validation set, over all ranks.

    Attributes:
        evaluation: Transcripts and errors.
        probe: Losses of some of the utterances; sums of nothing without diagnostics.
    """

    evaluation: Evaluation
    probe: ProbeSums


class Validator:
    """Transcribes the validation sets with the current weights of a model.

    Raises:
        ValueError: A manifest cannot be read, the normaliser is unknown, or the model does not
            support the decoding: raised before training starts.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: ASRModel,
        tokenizer: Tokenizer,
        context: DistributedContext,
    ) -> None:
        self._config = config.evaluation
        self._model = model
        self._tokenizer = tokenizer
        self._context = context
        get_normalizer(self._config.normalizer)
        Recognizer(model, tokenizer, self._config.decoding)
        self._sets: dict[str, list[Cut]] = {}
        self._probes: dict[str, Probe] = {}
        diagnostics = config.training.diagnostics
        for path in config.data.validation:
            every = iterate(path, language=config.data.language)
            cuts = list(islice(every, self._config.max_utterances))
            if not cuts:
                raise ValueError(f"{path}: holds no utterances.")
            part = shard(cuts, context.rank, context.size)
            name = _free_name(path, self._sets)
            self._sets[name] = part
            # A probe computes losses of utterances, which a language model has not.
            probes = config.model.language_model is None and diagnostics is not None
            if probes and diagnostics is not None and diagnostics.probe_utterances:
                self._probes[name] = Probe(
                    part,
                    model,
                    tokenizer,
                    count=diagnostics.probe_utterances,
                    # The training step has room for as many, and for their gradients.
                    frame_budget=config.data.known_frame_budget,
                    precision=self._config.decoding.precision,
                )

    def __call__(self) -> dict[str, SetResult]:
        """Return the results of each set; all ranks call this."""
        return {name: self._evaluate(name, cuts) for name, cuts in self._sets.items()}

    def _evaluate(self, name: str, cuts: list[Cut]) -> SetResult:
        part = evaluate(
            self._model,
            self._tokenizer,
            cuts,
            normalizer=self._config.normalizer,
            config=self._config.decoding,
        )
        probe = self._probes[name]() if name in self._probes else ProbeSums()
        evaluations, probes = zip(*self._context.all_gather((part, probe)), strict=True)
        return SetResult(merge(evaluations), reduce(add, probes))


def _free_name(path: str, taken: dict[str, list[Cut]]) -> str:
    """Return the name of a set's folder in ``evaluation/``: its manifest's, or a numbered one."""
    name = stem = set_name(path)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name
