"""Validation during training: the code of ``effasr evaluate``, split over the ranks."""

from __future__ import annotations

from itertools import islice

from lhotse.cut import Cut

from effasr.data.manifest.reader import iterate
from effasr.data.tokenizer import Tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.evaluate import evaluate, shard
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, merge, set_name
from effasr.model.asr import ASRModel
from effasr.training.config import TrainConfig
from effasr.transcription.recognizer import Recognizer


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
        for path in config.data.validation:
            every = iterate(path, language=config.data.language)
            cuts = list(islice(every, self._config.max_utterances))
            if not cuts:
                raise ValueError(f"{path}: holds no utterances.")
            part = shard(cuts, context.rank, context.size)
            self._sets[_free_name(path, self._sets)] = part

    def __call__(self) -> dict[str, Evaluation]:
        """Return the results of each set; all ranks call this."""
        return {name: self._evaluate(cuts) for name, cuts in self._sets.items()}

    def _evaluate(self, cuts: list[Cut]) -> Evaluation:
        part = evaluate(
            self._model,
            self._tokenizer,
            cuts,
            normalizer=self._config.normalizer,
            config=self._config.decoding,
        )
        return merge(self._context.all_gather(part))


def _free_name(path: str, taken: dict[str, list[Cut]]) -> str:
    """Return the name of a set's folder in ``evaluation/``: its manifest's, or a numbered one."""
    name = stem = set_name(path)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name
