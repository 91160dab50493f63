"""Text pairs of a run, for text-only micro-batches."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import TextExample, collate_text, with_experts
from effasr.data.config import DataConfig
from effasr.data.filters.config import Limits
from effasr.data.filters.rules import (
    TOKEN_RULES,
    Dropped,
    Lengths,
    Reason,
    RejectedUtterance,
    TokenizedText,
    require,
    require_spelling,
)
from effasr.data.index.base_corpus import BaseCorpus, digest, nothing_left
from effasr.data.index.columns import Ragged, RaggedBuilder, decode, encode, to_numpy
from effasr.data.manifest.pairs import TextPair, pairs
from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.prompt import Prompt
from effasr.data.sampling.cost import CANARY_180M_FLASH, CostModel
from effasr.data.sampling.packing import plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.population import population
from effasr.data.tokenizer import Tokenizer, UnknownLanguageError

_SEED = 0x7E47  # added to the seed of the run, so that the orders of text and speech are unrelated

_FILL = 0.98
"""Share of the budgets that micro-batches are planned to fill, which the planner reaches."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TextCorpus(BaseCorpus):
    """Text pairs that can be trained on beside speech.

    ``lengths.frames`` are the text encoder's tokens with its end token, ``lengths.tokens`` the
    decoder's: prompt and translation. The frames of the shape are the text encoder's rows.
    """

    shares: Mixture  # of the text encoder's tokens; one source without `DataConfig.mix`
    _ids: Ragged
    _read: Ragged
    _written: Ragged
    _prompt_lengths: np.ndarray
    _prompts: tuple[Prompt, ...]
    _prompt_ids: np.ndarray
    aligned: bool = False  # whether CTC and the transducer learn from the sources

    @classmethod
    def load(
        cls,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        token_budget: int,
        max_positions: int | None = None,
        sources: Sequence[int] | None = None,
    ) -> "TextCorpus":
        """Read manifests of text pairs and tokenize them.

        ``token_budget`` is the decoder's; `DataConfig.text_token_budget` replaces it. The text
        encoder's fills along with it. ``sources`` has the source of each manifest among the leaves
        of ``config.mix``.
        """
        budget = config.text_token_budget
        budget = token_budget if budget is None or budget == "auto" else budget
        builder = _TextIndexBuilder(tokenizer, budget, max_positions)
        sources = sources or [0] * len(paths)
        for path, source in zip(paths, sources, strict=True):
            for pair in pairs(path):
                builder.add(pair, source)
        if not len(builder.written):
            raise nothing_left(paths, "no text pair can be trained on", builder.dropped)
        # Without shares, all manifests belong to one source.
        mix = config.mix or MixConfig(sources={"text": tuple(map(str, paths))})
        corpus = builder.corpus(mix)
        corpus.shares.check(sources)
        return corpus

    @property
    def amounts(self) -> np.ndarray:
        """Tokens of the text encoder, by which shares are measured."""
        return self.lengths.frames

    def name(self, index: int) -> str:
        return decode(self._ids[index])

    def example(self, index: int) -> TextExample:
        written, split = self._written[index].tolist(), int(self._prompt_lengths[index])
        expert = None if self.experts is None else int(self.experts[index])
        source = self._read[index].tolist()
        return TextExample(self.name(index), source, written[:split], written[split:], expert)

    def batch(self, indices: np.ndarray) -> Batch:
        """Pack pairs, int (m,), into a text-only batch of the static shape, on the CPU."""
        examples = [self.example(index) for index in indices.tolist()]
        options = {"eos_id": self.eos_id, "pad_id": self.pad_id, "aligned": self.aligned}
        batch = collate_text(examples, self.shape, **options)
        return batch if self.experts is None else with_experts(batch)

    def with_experts(self, number: Callable[[Prompt], int]) -> "TextCorpus":
        """Return the same pairs, with the expert of each by its prompt."""
        by_prompt = np.array([number(prompt) for prompt in self._prompts], dtype=np.int64)
        return replace(self, experts=by_prompt[self._prompt_ids])

    def plan(
        self,
        epoch: int,
        *,
        steps: int,
        micro_batches: int,
        seed: int,
        cost: CostModel = CANARY_180M_FLASH,
    ) -> EpochPlan:
        """Plan the text-only micro-batches that go with an epoch of speech, in about ``steps``.

        Each source is an endless sequence: an epoch continues where the one before ended.
        """
        shape, requested = self.shape, self.shares.asked
        # Shares are of the tokens to read; sources may differ in the tokens to write for each.
        written = np.bincount(self.sources, self.lengths.tokens, len(requested))
        ratios = (written / np.maximum(self.shares.amounts, 1)).tolist()
        written_per_read = sum(
            share * ratio for share, ratio in zip(requested, ratios, strict=True)
        )
        rows = _FILL * min(shape.frame_budget, shape.token_budget / written_per_read)
        quotas = [round(share * rows * steps * micro_batches) for share in requested]
        seed += _SEED
        return plan_epoch(
            self.lengths,
            shape=shape,
            micro_batches=micro_batches,
            seed=seed,
            epoch=epoch,
            cost=cost,
            population=population(self.sources, self.amounts, quotas, seed=seed, epoch=epoch),
        )


def balanced_token_budget(
    speech: UtteranceLengths, text: UtteranceLengths, frames: int, costs: tuple[CostModel, ...]
) -> int:
    """Return the decoder tokens of pairs that cost as much as so many frames of speech.

    ``costs`` are those of an utterance, and of a pair.
    """
    of_speech, of_text = (
        float(cost.of(each.frames, each.tokens).mean())
        for cost, each in zip(costs, (speech, text), strict=True)
    )
    pairs = frames / float(speech.frames.mean()) * of_speech / of_text
    return max(round(pairs * float(text.tokens.mean())), int(text.tokens.max()))


def text_shape(
    lengths: UtteranceLengths, sources: np.ndarray, shares: Mixture, tokens: int
) -> StaticShape:
    """Return the shape of text-only batches, whose rows to read fill along with ``tokens``."""
    read, written = lengths.frames, lengths.tokens
    # What fills along with the other budget as pairs are drawn, and at least the longest's.
    total = int(read.sum(dtype=np.int64))
    quotas = [round(share * total) for share in shares.asked]
    drawn = population(sources, read, quotas, seed=0, epoch=0)
    swapped = UtteranceLengths(written[drawn], read[drawn])
    return StaticShape(
        int(max(suggest_token_budget(swapped, tokens), read.max())),
        tokens,
        # The number of utterances that is configured is that of speech.
        max(8, -(-tokens // 8)),
        longest_frames=int(read.max()),
        longest_tokens=int(written.max()),
    )


class _TextIndexBuilder:
    def __init__(self, tokenizer: Tokenizer, token_budget: int, max_positions: int | None) -> None:
        self.tokenizer = tokenizer
        self.token_budget = token_budget
        self.limits = Limits(max_positions=max_positions, ctc=False)
        self.dropped: list[Dropped] = []
        self.ids, self.read, self.written = (RaggedBuilder(code) for code in "Bii")
        self.prompt_lengths = array("i")
        self.sources = array("H")
        self.prompts: dict[Prompt, int] = {}
        self.prompt_ids = array("i")

    def add(self, pair: TextPair, source: int) -> None:
        try:
            read, prompt, text = self._tokenize(pair)
        except RejectedUtterance as error:
            self.dropped.append(Dropped(pair.id, error.reason, str(error), pair.origin))
            return
        self.ids.append(encode(pair.id))
        self.read.append(read)
        self.written.append(prompt + text)
        self.prompt_lengths.append(len(prompt))
        self.sources.append(source)
        self.prompt_ids.append(self.prompts.setdefault(pair.prompt, len(self.prompts)))

    def corpus(self, mix: MixConfig) -> TextCorpus:
        read, written, sources = self.read.build(), self.written.build(), to_numpy(self.sources)
        lengths = UtteranceLengths(*(x.lengths.astype(np.int32) for x in (read, written)))
        prompts, ids = tuple(self.prompts), to_numpy(self.prompt_ids)
        hashed = [lengths.frames, lengths.tokens, sources, written.values, read.values]
        shares = Mixture.of(mix, sources, lengths.frames, unit="tokens")
        return TextCorpus(
            lengths=lengths,
            shape=text_shape(lengths, sources, shares, self.token_budget),
            dropped=tuple(self.dropped),
            samples=np.zeros(len(sources), dtype=np.int64),
            sources=sources,
            shares=shares,
            fingerprint=digest(hashed),
            prompt=prompts[int(np.bincount(ids).argmax())],
            eos_id=self.tokenizer.eos_id,
            pad_id=self.tokenizer.pad_id,
            _ids=self.ids.build(),
            _read=read,
            _written=written,
            _prompt_lengths=to_numpy(self.prompt_lengths),
            _prompts=prompts,
            _prompt_ids=ids,
        )

    def _tokenize(self, pair: TextPair) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of the text encoder's input, of the decoder's prompt and of its target."""
        if not pair.source or not pair.text:
            raise RejectedUtterance(Reason.EMPTY_TEXT, "the text or its translation is empty")
        tokenizer = self.tokenizer
        try:
            prompt = tokenizer.prompt(pair.prompt)
            read = tokenizer.encode(pair.source, pair.prompt.source)
            text = tokenizer.encode(pair.text, pair.prompt.target)
        except UnknownLanguageError as error:
            raise RejectedUtterance(Reason.UNKNOWN_LANGUAGE, str(error)) from error
        for ids, words in ((read, pair.source), (text, pair.text)):
            tokens = TokenizedText(prompt, ids, False, tokenizer.count_unknown(ids))
            require_spelling(tokens, tokenizer, words)
        count = len(prompt) + len(text)
        # The budget to read is derived from it.
        if max(len(read) + 1, count) > self.token_budget:
            raise RejectedUtterance(
                Reason.TOKEN_BUDGET,
                f"{len(read) + 1} tokens to read and {count} to write, over {self.token_budget}",
            )
        require(TOKEN_RULES, Lengths(1.0, text=len(text), prompt=len(prompt)), self.limits)
        return [*read, tokenizer.eos_id], prompt, text
