"""Validation while training: the very code of ``effasr evaluate``, spread over the ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import islice

from lhotse.cut import Cut

from effasr.data.manifest.reader import iterate
from effasr.data.tokenizer import Tokenizer
from effasr.distributed.process_group import World
from effasr.evaluation.evaluate import evaluate, shard
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.result import Evaluation, merge, set_name
from effasr.model.asr import ASRModel
from effasr.optim.ema import WeightAverage
from effasr.training.config import TrainConfig
from effasr.transcription.recognizer import Recognizer


class Validator:
    """Transcribes sets with the weights as they are, or with their average.

    Args:
        config: ``data.validation`` and ``evaluation`` say which sets, and how.
        model: Not replicated.
        tokenizer: Of the model.
        world: The ranks: each transcribes its part of a set.

    Raises:
        ValueError: A manifest cannot be read, the normaliser is unknown, or the model cannot be
            decoded as asked: now, and not after hours of training.
    """

    def __init__(
        self, config: TrainConfig, model: ASRModel, tokenizer: Tokenizer, world: World
    ) -> None:
        self._config = config.evaluation
        self._model = model
        self._tokenizer = tokenizer
        self._world = world
        get_normalizer(self._config.normalizer)
        Recognizer(model, tokenizer, self._config.decoding)
        self._sets: dict[str, list[Cut]] = {}
        for path in config.data.validation:
            every = iterate(path, language=config.data.language)
            cuts = list(islice(every, self._config.max_utterances))
            if not cuts:
                raise ValueError(f"{path}: holds no utterances.")
            part = shard(cuts, world.rank, world.size)
            self._sets[_free_name(path, self._sets)] = part

    def __call__(self, average: WeightAverage | None = None) -> dict[str, Evaluation]:
        """Transcribe every set; all ranks together, and all get the results of whole sets."""
        with averaged(average):
            return {name: self._evaluate(cuts) for name, cuts in self._sets.items()}

    def _evaluate(self, cuts: list[Cut]) -> Evaluation:
        part = evaluate(
            self._model,
            self._tokenizer,
            cuts,
            normalizer=self._config.normalizer,
            config=self._config.decoding,
        )
        return merge(self._world.gather(part))


def averaged(average: WeightAverage | None) -> AbstractContextManager[None]:
    """While in it, the model has its averaged weights, if there is an average."""
    return nullcontext() if average is None else average.in_place()


def _free_name(path: str, taken: dict[str, list[Cut]]) -> str:
    """A set's folder in ``evaluation/``: after its manifest, and unlike those before."""
    name = stem = set_name(path)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return name
