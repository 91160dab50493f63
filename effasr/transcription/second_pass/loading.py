"""Loads what reads the alternatives of a search: a second language model, and a corrector."""

from __future__ import annotations

import torch

from effasr.checkpoint import load_model, resolve
from effasr.decoding.config import CORRECTOR_MARGIN, LM_WEIGHT, DecodingConfig
from effasr.decoding.lm.words import load_word_ngrams
from effasr.transcription.second_pass.corrector import Corrector
from effasr.transcription.second_pass.rescore import SecondPass, TextScorer
from effasr.transcription.second_pass.text_to_text import TextToText, source_of


def load_second_pass(config: DecodingConfig, device: torch.device) -> SecondPass | None:
    """Load the language model that chooses among the alternatives; None if there is none."""
    if config.second_lm is None:
        return None
    if config.second_lm.is_dir():
        # Imported here, because transformers takes seconds.
        from effasr.decoding.second_pass.causal_scorer import CausalScorer

        scorer: TextScorer = CausalScorer(config.second_lm, device)
    else:
        scorer = load_word_ngrams(config.second_lm)
    weight = LM_WEIGHT if config.second_lm_weight is None else config.second_lm_weight
    return SecondPass(scorer, weight, config.second_word_bonus or 0.0)


def load_corrector(config: DecodingConfig, device: torch.device) -> Corrector | None:
    """Load the model that writes texts from the alternatives; None if there is none."""
    if config.corrector is None:
        return None
    loaded = load_model(resolve(config.corrector), device)
    if loaded.model.config.text_encoder is None:
        raise ValueError(
            f"`corrector` must be a run of a model with a text encoder, but {config.corrector} "
            "has none: train one with the recipe corrector."
        )
    writer = TextToText(
        loaded.model,
        loaded.tokenizer,
        DecodingConfig(precision=config.precision),
        source=source_of(loaded.model.config, config.corrector_source),
    )
    given = config.corrector_margin
    margin = CORRECTOR_MARGIN if given is None else given
    return Corrector(writer, margin, words=config.words)
