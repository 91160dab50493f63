"""Loads the corpus of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from effasr.data.tokenizer import Tokenizer
from effasr.training.checkpointing.resume import Saved
from effasr.training.config import TrainConfig
from effasr.training.language_model import load_conversations

if TYPE_CHECKING:
    from effasr.data.conversation.corpus import ConversationCorpus
    from effasr.data.index.corpus import Corpus
    from effasr.data.index.pair_corpus import PairCorpus

log = logging.getLogger(__name__)


def load_corpus(
    config: TrainConfig, tokenizer: Tokenizer, saved: Saved | None
) -> Corpus | ConversationCorpus | PairCorpus:
    """Load the utterances, the conversations, or the text pairs to train on.

    Raises:
        ValueError: There are none, or they are not those of the checkpoint.
    """
    # Imported here so that a model can be trained without the packages that read data.
    from effasr.data.index.corpus import Corpus
    from effasr.data.index.corpus_cache import CorpusCache
    from effasr.data.index.pair_corpus import PairCorpus
    from effasr.data.index.text_corpus import TextCorpus
    from effasr.data.manifest.pairs import is_text_only

    manifests = config.data.manifests
    if not manifests:
        raise ValueError("`data.train` must name at least one manifest, but is empty.")
    where = "data.train" if config.data.mix is None else "data.mix"
    if config.model.language_model is not None:
        conversations = load_conversations(config, tokenizer)
        _check_same(saved, conversations.fingerprint, where)
        return conversations
    spoken, text_only = [], []
    for item in manifests:
        (text_only if is_text_only(item[0]) else spoken).append(item)
    _check_text(config, [path for path, _ in text_only])
    _check_speech(config, where, [path for path, _ in spoken])
    decoder = config.model.decoder
    max_positions = None if decoder is None else decoder.max_positions
    if config.data.text_alone:
        pairs = PairCorpus.load(
            [path for path, _ in text_only],
            tokenizer,
            config.data,
            max_positions=max_positions,
            sources=[source for _, source in text_only],
        )
        if (experts := config.model.named_experts(text=True)) is not None:
            pairs = pairs.with_experts(experts.number_of)
        _check_same(saved, pairs.fingerprint, where)
        return pairs
    corpus = Corpus.load(
        [path for path, _ in spoken],
        tokenizer,
        config.data,
        ctc=config.model.ctc,
        transducer=config.model.transducer is not None,
        max_frames=config.model.encoder.max_frames,
        max_positions=max_positions,
        framing=config.model.features.framing,
        sources=[source for _, source in spoken],
        read=CorpusCache(_cache_folder(config), lambda text: log.warning("%s", text)),
    )
    if text_only:
        text = TextCorpus.load(
            [path for path, _ in text_only],
            tokenizer,
            config.data,
            token_budget=corpus.shape.token_budget,
            max_positions=max_positions,
            sources=[source for _, source in text_only],
        )
        if (experts := config.model.named_experts(text=True)) is not None:
            text = text.with_experts(experts.number_of)
        corpus = corpus.with_text(text)
    if (experts := config.model.named_experts()) is not None:
        corpus = corpus.with_experts(experts.number_of)
    _check_same(saved, corpus.fingerprint, where)
    return corpus


def _check_same(saved: Saved | None, fingerprint: str, where: str) -> None:
    """Raise a ValueError if the corpus is not that of the checkpoint."""
    if saved is not None and saved.state["corpus"] != fingerprint:
        raise ValueError(
            f"`{where}` must hold the same utterances, texts and order that the checkpoint "
            "was trained on, but has changed. Restore it, choose another `name`, or start again "
            "with training.restart=true."
        )


def _cache_folder(config: TrainConfig) -> Path | None:
    if config.data.cache == "auto":
        return Path(config.output) / ".corpus"
    return None if config.data.cache is None else Path(config.data.cache)


def _check_text(config: TrainConfig, paths: Sequence[str]) -> None:
    """Check that text pairs have a share of the steps, and the model has a text encoder."""
    share = config.data.text_share
    if paths and share is None:
        raise ValueError(
            f"`data.text_share` must be given where a manifest is text-only, as {paths[0]} is: "
            "set it to the share of text-only micro-batches."
        )
    if share is None:
        return
    if not paths:
        raise ValueError(
            f"`data.text_share` must be null where no manifest is text-only, but is {share:g}: "
            "leave it out, or add a manifest of lines with `source_text` and `text`."
        )
    if config.model.text_encoder is None:
        raise ValueError(
            "`model.text_encoder` must be given for text-only batches, but is null: give it, "
            "such as model.text_encoder.layers=6, or leave out data.text_share and the manifests."
        )


def _check_speech(config: TrainConfig, where: str, paths: Sequence[str]) -> None:
    """Check that there is speech, unless the run is of text alone."""
    if config.data.text_alone and paths:
        raise ValueError(
            f"`{where}` must name text-only manifests where `data.text_share` is 1, but "
            f"{paths[0]} has audio: leave it out, or set a share below 1."
        )
    if not config.data.text_alone and not paths:
        raise ValueError(
            f"`{where}` must name at least one manifest with audio, but all are text-only: set "
            "data.text_share=1 to train on text alone."
        )
