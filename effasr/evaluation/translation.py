"""BLEU and chrF of translations, computed by sacrebleu with its defaults."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from effasr.evaluation.metric import BY_NAME, Metric


@dataclass(frozen=True, slots=True)
class TranslationCounts:
    """n-grams of translations, whose sums give BLEU."""

    metric: ClassVar[Metric] = BY_NAME["bleu"]

    # Equal n-grams of 1 to 4 words, all of the hypothesis, and the words of both texts.
    statistics: tuple[int, ...]
    errors: float  # 100 minus BLEU of the sentence, which adds up over utterances

    @property
    def words(self) -> int:
        return self.statistics[-1]

    @classmethod
    def rates(cls, sums: np.ndarray) -> np.ndarray:
        """Return BLEU of each column of sums, float64 (n,)."""
        from sacrebleu.metrics.bleu import BLEU

        scores = [
            BLEU.compute_bleu(
                *(column[:4].tolist(), column[4:8].tolist()),
                *map(int, column[8:]),
                smooth_method="exp",
            )
            for column in sums.T
        ]
        return np.array([score.score for score in scores], dtype=np.float64)


class MissingPackage(ValueError):
    """A package that scores translations is not installed."""


def check_package() -> None:
    """Check that translations can be scored; call it before they are made."""
    if find_spec("sacrebleu") is None:
        raise MissingPackage(
            "BLEU of translations must have the package sacrebleu, which is not installed: pip "
            "install 'effasr[translation]'."
        )


@cache
def bleu_of(language: str, *, of_sentences: bool = False) -> Any:
    from sacrebleu.metrics.bleu import BLEU

    try:
        # Chinese, Japanese and Korean have tokenizers of their own.
        return BLEU(trg_lang=language, effective_order=of_sentences)
    except RuntimeError as error:
        raise MissingPackage(
            f"BLEU of translations to {language} must have sacrebleu's tokenizer of that language: "
            f"pip install 'sacrebleu[{language}]'."
        ) from error


def count_ngrams(reference: str, hypothesis: str, language: str) -> TranslationCounts:
    score = bleu_of(language).corpus_score([hypothesis], [[reference]])
    sentence = bleu_of(language, of_sentences=True).sentence_score(hypothesis, [reference])
    statistics = *score.counts, *score.totals, score.sys_len, score.ref_len
    return TranslationCounts(tuple(map(int, statistics)), 100 - sentence.score)
