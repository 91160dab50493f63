"""Builds the diagnostics of a run."""

from __future__ import annotations

from effasr.data.conversation.corpus import ConversationCorpus
from effasr.data.index.corpus import Corpus
from effasr.data.index.pair_corpus import PairCorpus
from effasr.decoding.checks import choose_method
from effasr.model.asr import ASRModel
from effasr.training.config import TrainConfig
from effasr.training.diagnostics.ctc_plateau import CTCBaseline
from effasr.training.diagnostics.monitor import Diagnostics

_TRANSCRIPTS = 20_000
"""Largest number of utterances for computing the CTC loss without audio."""

_FASTCONFORMER_SUBSAMPLING = 8


def build_diagnostics(
    config: TrainConfig, model: ASRModel, corpus: Corpus | ConversationCorpus | PairCorpus
) -> Diagnostics | None:
    """Return the diagnostics of a run, or None where ``training.diagnostics`` is null.

    Args:
        config: Resolved training configuration.
        model: The model; only its configuration is read.
        corpus: Training corpus.
    """
    settings = config.training.diagnostics
    # They watch the outputs of an encoder-decoder model, CTC or a transducer.
    watched = config.model.language_model is None and config.model.best_rq is None
    watched = watched and not config.data.text_alone
    if settings is None or not watched:
        return None
    baseline = None
    if config.model.ctc and (config.loss.ctc_weight or config.loss.ctc_weight_before):
        baseline = CTCBaseline.of(corpus.transcripts(_TRANSCRIPTS))
    encoder = config.model.encoder
    is_by_eight = encoder.subsampling == _FASTCONFORMER_SUBSAMPLING
    return Diagnostics(
        settings,
        choose_method(model, config.evaluation.decoding.method),
        baseline,
        has_ctc=config.model.ctc,
        can_subsample_less=encoder.kind == "fastconformer" and is_by_eight,
    )
