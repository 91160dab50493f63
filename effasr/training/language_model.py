"""Settings, vocabulary and conversations of a run that trains a speech language model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from effasr import config as configuration
from effasr.data.tokenizer import ChatTokenizer, Tokenizer
from effasr.model.asr import ASRModel
from effasr.training.checkpointing.resume import Saved
from effasr.training.config import TrainConfig

if TYPE_CHECKING:
    from effasr.data.conversation.corpus import ConversationCorpus


def resolve_language_model(config: TrainConfig, saved: Saved | None) -> TrainConfig:
    """Return the configuration with the architecture of the language model.

    It is that of the checkpoint, so that a run continues without the folder, or of the folder.

    Raises:
        ValueError: The folder cannot be used.
        ImportError: transformers is not installed.
    """
    # Imported here, because transformers takes seconds.
    from effasr.model.language_model.architecture import read_architecture

    settings = config.model.language_model
    assert settings is not None
    if settings.architecture is not None:
        return config
    if saved is not None:
        before = configuration.complete(TrainConfig, saved.state["config"])["model"]
        stored = before.get("language_model") or {}
        architecture = stored.get("architecture")
        if architecture is None:
            raise ValueError(
                "`model.language_model` must stay null, as in the checkpoint of this run: choose "
                "another `name`, or start again with training.restart=true."
            )
    else:
        architecture = read_architecture(settings.path)
    settings = replace(settings, architecture=architecture)
    return replace(config, model=replace(config.model, language_model=settings))


def check_vocabulary(model: ASRModel) -> None:
    """Raise a ValueError if a language model lacks tokens of its tokenizer."""
    language_model = model.language_model
    if language_model is not None and model.vocab_size > language_model.vocab_size:
        raise ValueError(
            "`data.tokenizer` must have at most the "
            f"{language_model.vocab_size} tokens of the language model, but has "
            f"{model.vocab_size}: use the tokenizer of its folder."
        )


def load_conversations(config: TrainConfig, tokenizer: Tokenizer) -> ConversationCorpus:
    """Load the conversations to train on.

    Raises:
        ValueError: The tokenizer has no chat template, a manifest is not one of conversations, or
            none can be trained on.
    """
    from effasr.data.conversation.corpus_builder import load_conversation_corpus
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
