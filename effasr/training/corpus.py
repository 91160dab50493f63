"""Loads the corpus of a run: utterances, conversations, or text pairs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from effasr import config as configuration
from effasr.checks import check
from effasr.data.prompt import warn_assumed
from effasr.data.tokenizer import ChatTokenizer, Tokenizer
from effasr.model.cost import cost_model, text_cost_model
from effasr.training.checkpointing.resume import Saved, begin_anew
from effasr.training.config import TrainConfig
from effasr.untrusted.remote import cache_folder, is_url

if TYPE_CHECKING:
    from effasr.data.conversation.corpus import ConversationCorpus
    from effasr.data.index.corpus import Corpus
    from effasr.data.index.text_corpus import TextCorpus
    from effasr.data.sampling.cost import CostModel

    TrainingCorpus = Corpus | ConversationCorpus

log = logging.getLogger(__name__)


def load_corpus(config: TrainConfig, tokenizer: Tokenizer, saved: Saved | None) -> TrainingCorpus:
    """Load what to train on, which has to be what the checkpoint was trained on."""
    check(config.data.manifests, "data.train", "name at least one manifest", "empty")
    section = "data.train" if config.data.mix is None else "data.mix"
    if config.model.language_model is not None:
        corpus: TrainingCorpus = _load_conversations(config, tokenizer)
    else:
        corpus = _load_utterances(config, tokenizer, section)
        if languages := config.model.language_adapters:
            _check_adapters(languages, corpus)
    if saved is not None and saved.state["corpus"] != corpus.fingerprint:
        raise ValueError(
            f"`{section}` must hold the same utterances, texts and order that the checkpoint "
            "was trained on, but has changed: restore it, "
            f"{begin_anew(configuration.to_mapping(config))}."
        )
    return corpus


def _load_utterances(config: TrainConfig, tokenizer: Tokenizer, section: str) -> TrainingCorpus:
    """Load speech, and text pairs beside it."""
    # Imported here so that a model can be trained without the packages that read data.
    from effasr.data.manifest.pairs import is_text_only

    spoken, text_only = [], []
    for manifest in config.data.manifests:
        (text_only if is_text_only(manifest[0]) else spoken).append(manifest)
    _check_text(config, [path for path, _ in text_only])
    rule = "name at least one manifest with audio"
    check(spoken, section, rule, "text-only", "add one: texts are trained beside speech")
    decoder = config.model.decoder
    max_positions = None if decoder is None else decoder.max_positions
    text_experts = config.model.named_experts(text=True)
    from effasr.data.index.corpus import Corpus
    from effasr.data.index.corpus_cache import CorpusCache

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
    _check_unknown(*corpus.count_unknown(tokenizer), config.data.filters.max_unknown)
    if text_only:
        from effasr.data.index.text_corpus import TextCorpus, balanced_token_budget, text_shape

        text = TextCorpus.load(
            [path for path, _ in text_only],
            tokenizer,
            config.data,
            token_budget=corpus.shape.token_budget,
            max_positions=max_positions,
            sources=[source for _, source in text_only],
        )
        text = _aligned(text, config)
        if config.data.text_token_budget == "auto":
            costs = text_costs(config, tokenizer)
            frames = corpus.shape.frame_budget
            budget = balanced_token_budget(corpus.lengths, text.lengths, frames, costs)
            shape = text_shape(text.lengths, text.sources, text.shares, budget)
            text = replace(text, shape=shape)
        if text_experts is not None:
            text = text.with_experts(text_experts.number_of)
        corpus = corpus.with_text(text)
    if (experts := config.model.numbering()) is not None:
        corpus = corpus.with_experts(experts.number_of)
    if config.data.language is None and config.model.is_told_language(tokenizer.sources):
        language = config.data.assumed_language
        warn_assumed(corpus.assumed, len(corpus), language, f"set data.language={language}")
    return corpus


def _check_adapters(languages: tuple[str, ...], corpus: TrainingCorpus) -> None:
    """Check that each adapter learns; say how many utterances have none."""
    numbers = [x.experts for x in (corpus, corpus.text) if x is not None and x.experts is not None]
    counts = np.bincount(np.concatenate(numbers), minlength=len(languages) + 1)
    *adapted, others = counts.tolist()
    unused = [name for name, count in zip(languages, adapted, strict=True) if not count]
    rule = "name languages of the training data"
    remedy = "leave it out, or name `lang` in the lines of the manifest"
    check(not unused, "lora.by_language", rule, ", ".join(unused), remedy)
    if others:
        log.warning(
            "%d of %d utterances are in languages without an adapter (lora.by_language: %s): their "
            "rows use the weights without one.",
            *(others, others + sum(adapted), ", ".join(languages)),
        )


def text_costs(config: TrainConfig, tokenizer: Tokenizer) -> tuple[CostModel, CostModel]:
    """Return the costs of an utterance and of a text pair, which a text encoder reads."""
    text = text_cost_model(config.model, tokenizer.vocab_size)
    assert text is not None
    return cost_model(config.model, tokenizer.vocab_size), text


def _aligned(text: TextCorpus, config: TrainConfig) -> TextCorpus:
    """The same pairs, from whose sources CTC and the transducer learn as well, if they can."""
    encoder = config.model.text_encoder
    if encoder is None or not encoder.shared_layers:
        return text
    reach, rows = config.model.encoder.max_frames, text.shape.longest_frames
    longest = encoder.upsample * (rows or 0)
    if reach is not None and longest > reach:
        raise ValueError(
            f"`model.encoder.max_frames` must be at least the {longest} rows of the longest text "
            f"with text_encoder.upsample = {encoder.upsample}, but is {reach}: raise it, lower "
            "`model.text_encoder.upsample`, or leave out longer texts."
        )
    return replace(text, aligned=True)


def _check_unknown(unknown: int, tokens: int, limit: float) -> None:
    if not unknown:
        return
    told = (
        f"{unknown} of {tokens} tokens of `data.train` ({100 * unknown / tokens:.1f} %) are "
        "unknown to the tokenizer (`effasr prepare --tokenizer` names their characters)"
    )
    if unknown > limit * tokens:
        raise ValueError(
            f"{told}, over the {100 * limit:g} % that `data.filters.max_unknown` allows: train a "
            "tokenizer on these texts, or bring them into the form of those it was trained on."
        )
    log.warning("%s.", told)


def _cache_folder(config: TrainConfig) -> Path | None:
    if config.data.cache == "auto":
        is_remote = is_url(config.output)
        return cache_folder() / "corpus" if is_remote else Path(config.output) / ".corpus"
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
    rule = "be null where no manifest is text-only"
    remedy = "leave it out, or add a manifest of lines with `source_text` and `text`"
    check(paths, "data.text_share", rule, f"{share:g}", remedy)
    if config.model.text_encoder is None:
        raise ValueError(
            "`model.text_encoder` must be given for text-only batches, but is null: give it, "
            "such as model.text_encoder.layers=6, or leave out data.text_share and the manifests."
        )


def _load_conversations(config: TrainConfig, tokenizer: Tokenizer) -> ConversationCorpus:
    from effasr.data.conversation.corpus import load_conversation_corpus
    from effasr.data.conversation.messages import is_conversations
    from effasr.model.language_model.architecture import max_rows

    settings = config.model.language_model
    assert settings is not None
    assert settings.architecture is not None
    if not isinstance(tokenizer, ChatTokenizer):
        raise ValueError(
            "`data.tokenizer` must have a chat template for a language model, but is a "
            f"{type(tokenizer).__name__}: leave it out for that of model.language_model.path."
        )
    for path, _ in config.data.manifests:
        if not is_conversations(Path(path)):
            raise ValueError(
                f"{path}: must be a manifest of conversations for a language model, JSON lines "
                "with `messages`, but is not: see docs/speech-language-models.md."
            )
    return load_conversation_corpus(
        [path for path, _ in config.data.manifests],
        tokenizer,
        config.data,
        stack=settings.stack,
        max_frames=config.model.encoder.max_frames,
        max_rows=max_rows(settings.architecture),
        framing=config.model.features.framing,
        sources=[source for _, source in config.data.manifests],
    )
