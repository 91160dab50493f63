"""Describes data and model before the first step."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import nn

from effasr.data.batch import StaticShape
from effasr.data.config import DataConfig
from effasr.data.conversation.corpus import ConversationCorpus
from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.rules import Reason
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader
from effasr.data.manifest.pairs import is_text_only
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.statistics import guidance
from effasr.data.statistics.survey import SAMPLE, FramesPerToken, survey
from effasr.data.tokenizer import SentencePieceTokenizer, Tokenizer
from effasr.model.config import ModelConfig


def describe_batches(
    plan: EpochPlan, shape: StaticShape | None, lengths: UtteranceLengths, config: DataConfig
) -> str:
    begin = f"{plan.micro_batches} micro-batches a step, "
    paddings = (
        f"frames ({100 * plan.padding_frames:.1f} % padding)",
        f"tokens ({100 * plan.padding_tokens:.1f} %)",
    )
    if shape is not None:
        budgets = shape.frame_budget, shape.token_budget
        if not lengths.tokens.any():
            return f"{begin}each {budgets[0]} {paddings[0]}, without tokens"
        return f"{begin}each {budgets[0]} {paddings[0]} and {budgets[1]} {paddings[1]}"
    count = len(plan.offsets) - 1
    frames, tokens = (
        round(int(values[plan.indices].sum()) / count)
        for values in (lengths.frames, lengths.tokens)
    )
    return (
        f"{begin}{config.strategy}{', padded' if config.padded else ''}, each on average "
        f"{len(plan.indices) / count:.1f} utterances with {frames} {paddings[0]} and {tokens} "
        f"{paddings[1]}"
    )


def describe_model(model: nn.Module) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    of_these = f" ({trained / 1e6:.2f} M trained)" if trained < parameters else ""
    return f"{parameters / 1e6:.2f} M parameters{of_these}"


def describe_data(
    corpus: Corpus | ConversationCorpus,
    loader: Loader,
    config: DataConfig,
    epoch: int,
    dropped: Path,
) -> Iterator[str]:
    """Yield lines about batches, augmentation and sources of an epoch, and dropped utterances."""
    plan = loader.plan(epoch)
    yield describe_batches(plan, loader.shape, corpus.lengths, config)
    if loader.shape is not None and (filled := 1 - plan.padding_frames) < 1 / 3:
        budget = max(loader.shape.longest_frames or 1, round(filled * loader.shape.frame_budget))
        yield (
            f"the corpus fills {100 * filled:.0f} % of a batch, and the rest is computed in vain: "
            f"set data.frame_budget to {budget} or less, for more and cheaper steps"
        )
    if config.speeds != (1.0,):
        speeds = ", ".join(map(str, config.speeds))
        yield f"each utterance at the speeds {speeds}, each as an utterance of its own"
    if (padding := config.silence_padding) is not None:
        yield f"of the utterances, {padding}"
    if augmentation := loader.augmentation:
        yield f"of the utterances, {augmentation}"
    if (text := corpus.text) is not None:
        yield (
            f"and {config.text_micro_batches} of text alone, each "
            f"{text.shape.frame_budget} tokens to read and {text.shape.token_budget} to write, "
            f"from {len(text)} pairs"
        )
    if isinstance(corpus, ConversationCorpus) and corpus.divided:
        yield (
            f"{corpus.divided} conversations have an example for each answer, as the chat template "
            "shows earlier answers in another way than the last"
        )
    for summary in corpus.summaries(plan, loader.text_plan(epoch)):
        yield from summary.table()
    if corpus.dropped:
        reasons = Counter(dropped.reason for dropped in corpus.dropped)
        listed = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        yield f"dropped {len(corpus.dropped)} utterances ({listed}), each listed in {dropped}"


def describe_alignment(
    corpus: Corpus | ConversationCorpus,
    data: DataConfig,
    model: ModelConfig,
    tokenizer: Tokenizer,
    *,
    fixed: bool,
) -> Iterator[str]:
    """Yield lines about characters, speakers and frames per token, and warn where CTC is hard.

    Lengths are those of the training corpus. Texts (a few thousand of each manifest) are read only
    if a larger vocabulary must be found.
    """
    characters = 0
    if isinstance(tokenizer, SentencePieceTokenizer):
        # The characters that occur are those of the pieces that occur.
        ids = corpus.token_ids(tokenizer.vocab_size).tolist()
        pieces = (tokenizer.decode([token]) for token in ids)
        characters = len({item for piece in pieces for item in piece if not item.isspace()})
    if letters := guidance.describe_letters(characters, corpus.speakers):
        yield letters
    if not model.ctc:
        return
    framing = model.features.framing
    excluded = sum(drop.reason == Reason.CTC_INFEASIBLE for drop in corpus.dropped)
    result = _frames_per_token(corpus, framing, excluded)
    if result is None:
        return
    yield guidance.describe_alignment(result, framing)
    paths = [path for path, _ in data.manifests if not is_text_only(path)]
    yield from guidance.warn_about_alignment(
        result,
        framing,
        with_subsampling=lambda other: _frames_per_token(
            corpus, replace(framing, subsampling=other)
        ),
        survey=None
        if fixed
        else lambda: survey(
            paths,
            language=data.assumed_language,
            most=SAMPLE,
            untranscribed=data.text != "required",
        ),
    )


def _frames_per_token(
    corpus: Corpus | ConversationCorpus, framing: Framing, excluded: int = 0
) -> FramesPerToken | None:
    """Return frames per token of the texts that follow the speech; None without such texts."""
    follows = corpus.monotonic
    if not follows.any():
        return None
    frames = framing.frames(corpus.samples[follows].astype(np.int64))
    return FramesPerToken.of(frames, corpus.text_lengths[follows], excluded=excluded)
