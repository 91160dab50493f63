"""The weights that combine scores, and the values to try for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from effasr.decoding.config import CORRECTOR_MARGIN, LENGTH_PENALTY, LM_WEIGHT, DecodingConfig
from effasr.model.asr import ASRModel

GRIDS: dict[str, tuple[float, ...]] = {
    "ctc_weight": (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "lm_weight": (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0),
    "length_penalty": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2),
    "second_lm_weight": (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0),
    "second_word_bonus": (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0),
    "corrector_margin": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 1000.0),
}
"""Values of each field of `Weights`. A language model of weight 0 is refused by `DecodingConfig`:
it is left out instead."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The fields of `DecodingConfig` of the same names, without None."""

    ctc_weight: float = 0.0
    lm_weight: float = LM_WEIGHT
    length_penalty: float = 0.0
    second_lm_weight: float = LM_WEIGHT
    second_word_bonus: float = 0.0
    corrector_margin: float = CORRECTOR_MARGIN

    @classmethod
    def of(cls, config: DecodingConfig, method: str) -> Weights:
        """Return the weights with which a configuration decodes by a method."""
        given = config.length_penalty
        penalty = LENGTH_PENALTY if given is None else given
        weights = cls(
            ctc_weight=config.ctc_weight,
            length_penalty=penalty if method == "attention" else 0.0,
            second_word_bonus=config.second_word_bonus or 0.0,
        )
        names = ("lm_weight", "second_lm_weight", "corrector_margin")
        chosen = {name: getattr(config, name) for name in names}
        return replace(weights, **{k: v for k, v in chosen.items() if v is not None})


def tunable(model: ASRModel, config: DecodingConfig, method: str) -> tuple[str, ...]:
    """Return the names of the weights that have an effect on the choice.

    With a second language model the length penalty has none: it ranks by scores. With a corrector
    it is the margin alone, because what the corrector reads depends on the others.

    Raises:
        ValueError: There is none.
    """
    if config.corrector is not None:
        return ("corrector_margin",)
    attends, second = method == "attention", config.second_lm is not None
    has_effect = {
        "ctc_weight": attends and model.config.ctc,
        "lm_weight": config.lm is not None,
        "length_penalty": attends and not second,
        "second_lm_weight": second,
        "second_word_bonus": second,
    }
    found = tuple(name for name, there in has_effect.items() if there)
    if not found:
        raise ValueError(
            f"`method` {method} must have a weight to tune, but has none by itself: add "
            "`second_lm`, or for CTC `lm`."
        )
    return found
