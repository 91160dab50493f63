"""Validation during training: the code of ``effasr evaluate``, split over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice
from operator import add

from lhotse.cut import Cut

from effasr.data.manifest.pairs import TextPair, is_text_only, pairs
from effasr.data.manifest.reader import iterate
from effasr.data.tokenizer import Tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.evaluate import evaluate, evaluate_pairs, shard
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, free_set_name, merge
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.training.config import TrainConfig
from effasr.training.diagnostics.probe import Probe, ProbeSums
from effasr.training.fault_tolerance.stop import StopRequest
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.second_pass.text_to_text import TextToText


@dataclass(frozen=True, slots=True)
class SetResult:
    """Results of a validation set, over all ranks; the probe has zero sums without diagnostics."""

    evaluation: Evaluation
    probe: ProbeSums


class Validator:
    """Transcribes the validation sets with the current weights of a model.

    Of text pairs, the text encoder reads the sources.
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
        # Unknown settings are errors before training starts.
        get_normalizer(self._config.normalizer)
        Recognizer(model, tokenizer, self._config.decoding)
        self._sets: dict[str, list[Cut] | list[TextPair]] = {}
        self._probes: dict[str, Probe] = {}
        diagnostics = config.training.diagnostics
        for path in config.data.validation:
            name = free_set_name(path, self._sets)
            if is_text_only(path):
                TextToText(model, tokenizer, self._config.decoding)
                members = list(islice(pairs(path), self._config.max_utterances))
                _check_experts(config.model, members)
                self._sets[name] = members[context.rank :: context.size]
                continue
            cuts = list(
                islice(iterate(path, language=config.data.language), self._config.max_utterances)
            )
            if not cuts:
                raise ValueError(f"{path}: holds no utterances.")
            self._sets[name] = part = shard(cuts, context.rank, context.size)
            # Language models have no per-utterance losses.
            has_losses = config.model.language_model is None
            if has_losses and diagnostics is not None and diagnostics.probe_utterances:
                self._probes[name] = Probe(
                    part,
                    model,
                    tokenizer,
                    count=diagnostics.probe_utterances,
                    # The training step has room for as many, and for their gradients.
                    frame_budget=config.data.known_frame_budget,
                    precision=self._config.decoding.precision,
                )

    def __call__(self, stop: StopRequest) -> dict[str, SetResult]:
        """Return the results of each set; all ranks call this. A stop is a StopInterrupt."""
        results = {}
        for name, members in self._sets.items():
            parts = stop.gather(self._context, partial(self._evaluate, name, members))
            evaluations, probes = zip(*parts, strict=True)
            results[name] = SetResult(merge(evaluations), reduce(add, probes))
        return results

    def _evaluate(
        self, name: str, members: list[Cut] | list[TextPair]
    ) -> tuple[Evaluation, ProbeSums]:
        function = evaluate_pairs if isinstance(next(iter(members), None), TextPair) else evaluate
        part = function(
            self._model,
            self._tokenizer,
            members,  # type: ignore[arg-type]
            normalizer=self._config.normalizer,
            config=self._config.decoding,
        )
        return part, self._probes[name]() if name in self._probes else ProbeSums()


def _check_experts(config: ModelConfig, members: Sequence[TextPair]) -> None:
    """Check that there is an expert for each pair, where names choose them."""
    if (experts := config.named_experts(text=True)) is None:
        return
    for pair in members:
        try:
            experts.number_of(pair.prompt, pair.source_name)
        except ValueError as error:
            raise ValueError(f"{pair.origin}: {error}") from error
