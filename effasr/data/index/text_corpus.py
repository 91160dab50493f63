"""Text pairs of a run, for text-only micro-batches."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import TextExample, collate_text, with_experts
from effasr.data.config import DataConfig
from effasr.data.filters.rules import Dropped, Reason, TokenizedText, Unfit, spells_something
from effasr.data.index.columns import Ragged, RaggedBuilder, decode, encode, to_numpy
from effasr.data.manifest.pairs import TextPair, pairs
from effasr.data.mixture import MixConfig
from effasr.data.mixture_summary import Mixture
from effasr.data.prompt import Prompt
from effasr.data.sampling.packing import plan_epoch, suggest_token_budget
from effasr.data.sampling.plan import EpochPlan, UtteranceLengths
from effasr.data.sampling.population import population
from effasr.data.tokenizer import Tokenizer, UnknownLanguageError

_SEED = 0x7E47
"""Added to the seed of the run, so that the orders of text and speech are unrelated."""

_FILL = 0.98
"""Share of the budgets that micro-batches are planned to fill, which the planner reaches."""


@dataclass(frozen=True, slots=True, eq=False)
class TextCorpus:
    """Text pairs that can be trained on; made by `TextCorpus.load`.

    Attributes:
        lengths: ``frames`` are the text encoder's tokens, with its end token; ``tokens`` are the
            decoder's, prompt and translation.
        shape: The static shape of every text-only batch; its frames are the text encoder's rows.
        dropped: Pairs of the manifests that were left out, with the reasons.
        sources: uint16 (n,), the source of each pair.
        mixture: Requested share of each source in the text encoder's tokens.
        fingerprint: Digest of lengths, texts, sources and order.
        prompt: The most frequent prompt.
        eos_id: Token id of the tokenizer's end of sentence.
        pad_id: Token id of the tokenizer's padding.
    """

    lengths: UtteranceLengths
    shape: StaticShape
    dropped: tuple[Dropped, ...]
    sources: np.ndarray
    mixture: Mixture
    fingerprint: str
    prompt: Prompt
    eos_id: int
    pad_id: int
    _ids: Ragged
    _read: Ragged
    _written: Ragged
    _prompt_lengths: np.ndarray
    _requests: tuple[tuple[Prompt, str | None], ...]
    _request_ids: np.ndarray
    _experts: np.ndarray | None = None

    @classmethod
    def load(
        cls,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        token_budget: int | None,
        row_budget: int | None = None,
        max_positions: int | None = None,
        sources: Sequence[int] | None = None,
    ) -> TextCorpus:
        """Read manifests of text pairs and tokenize them.

        Args:
            paths: See `effasr.data.manifest.pairs.pairs`.
            tokenizer: Tokenizer of texts and prompts.
            config: The sources, ``text_token_budget`` and ``max_sequences``.
            token_budget: Decoder tokens of a micro-batch if ``config.text_token_budget`` is not
                set; None for what fills along with ``row_budget``.
            row_budget: Text encoder's tokens of a micro-batch; None for what fills along with
                ``token_budget``. One of the two is given.
            max_positions: Most decoder tokens that the model accepts; None for no limit.
            sources: Source of each manifest, as an index into the leaves of ``config.mix``; by
                default all belong to one.

        Raises:
            ValueError: A manifest is malformed, or no pair is left.
        """
        budget = config.text_token_budget or token_budget
        builder = _TextIndexBuilder(tokenizer, row_budget, budget, max_positions)
        sources = sources or [0] * len(paths)
        for path, source in zip(paths, sources, strict=True):
            for pair in pairs(path):
                builder.add(pair, source)
        if not len(builder.written):
            first = f"; the first: {builder.dropped[0].details}" if builder.dropped else ""
            raise ValueError(
                f"{', '.join(map(str, paths))}: no text pair can be trained on "
                f"({len(builder.dropped)} dropped{first})."
            )
        # Without shares, all manifests belong to one source.
        mix = config.mix or MixConfig(sources={"text": tuple(map(str, paths))})
        corpus = builder.corpus(mix, config.max_sequences if config.text_alone else None)
        corpus.mixture.check(sources)
        return corpus

    def __len__(self) -> int:
        return len(self.lengths)

    def batch(self, indices: np.ndarray) -> Batch:
        """Pack pairs, int (m,), into a text-only batch of the static shape, on the CPU."""
        return self.collate([self.example(index) for index in indices.tolist()], self.shape)

    def collate(self, examples: Sequence[TextExample], shape: StaticShape) -> Batch:
        """Pack pairs on the CPU; see `effasr.data.collate.collate_text`."""
        batch = collate_text(examples, shape, eos_id=self.eos_id, pad_id=self.pad_id)
        return batch if self._experts is None else with_experts(batch)

    def with_experts(self, number: Callable[[Prompt, str | None], int]) -> TextCorpus:
        """Return the same pairs, with the expert of each.

        Args:
            number: Returns the number of the expert for the prompt of a pair and the name of what
                it comes from, which may be None.
        """
        by_request = np.array([number(*request) for request in self._requests], dtype=np.int64)
        return replace(self, _experts=by_request[self._request_ids])

    def plan(self, epoch: int, *, steps: int, micro_batches: int, seed: int) -> EpochPlan:
        """Plan the text-only micro-batches that go with an epoch of speech.

        Each source is an endless sequence: an epoch continues where the one before ended.

        Args:
            epoch: Number of the epoch of speech.
            steps: Approximate global steps of every epoch of speech.
            micro_batches: Text-only micro-batches of a global step, over all ranks.
            seed: Seed of the run.

        Returns:
            A plan of about as many steps.
        """
        read, shape = self.lengths.frames, self.shape
        # Shares are of the tokens to read; sources may differ in the tokens to write for each.
        asked = self.mixture.asked
        written = np.bincount(self.sources, self.lengths.tokens, len(asked))
        ratios = (written / np.maximum(self.mixture.amounts, 1)).tolist()
        written_per_read = sum(share * ratio for share, ratio in zip(asked, ratios, strict=True))
        rows = _FILL * min(shape.frame_budget, shape.token_budget / written_per_read)
        quotas = [round(share * rows * steps * micro_batches) for share in asked]
        seed += _SEED
        return plan_epoch(
            self.lengths,
            shape=shape,
            micro_batches=micro_batches,
            seed=seed,
            epoch=epoch,
            population=population(self.sources, read, quotas, seed=seed, epoch=epoch),
        )

    def token_ids(self) -> np.ndarray:
        """Return the distinct token ids of all texts and prompts, sorted."""
        return np.union1d(self._read.values, self._written.values)

    def example(self, index: int) -> TextExample:
        """Return a pair, ready to be packed."""
        written, split = self._written[index].tolist(), int(self._prompt_lengths[index])
        name = decode(self._ids[index])
        expert = None if self._experts is None else int(self._experts[index])
        read = self._read[index].tolist()
        return TextExample(name, read, written[:split], written[split:], expert)


class _TextIndexBuilder:
    """Builds a `TextCorpus`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        row_budget: int | None,
        token_budget: int | None,
        max_positions: int | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.row_budget = row_budget
        self.token_budget = token_budget
        self.max_positions = max_positions
        self.dropped: list[Dropped] = []
        self.ids, self.read, self.written = (RaggedBuilder(code) for code in "Bii")
        self.prompt_lengths = array("i")
        self.sources = array("H")
        self.requests: dict[tuple[Prompt, str | None], int] = {}
        self.request_ids = array("i")

    def add(self, pair: TextPair, source: int) -> None:
        """Add a pair, or record why it was dropped."""
        try:
            read, prompt, text = self._tokenize(pair)
        except Unfit as error:
            self.dropped.append(Dropped(pair.id, error.reason, str(error), pair.origin))
            return
        self.ids.append(encode(pair.id))
        self.read.append(read)
        self.written.append(prompt + text)
        self.prompt_lengths.append(len(prompt))
        self.sources.append(source)
        request = pair.prompt, pair.source_name
        self.request_ids.append(self.requests.setdefault(request, len(self.requests)))

    def corpus(self, mix: MixConfig, max_sequences: int | None) -> TextCorpus:
        """Return the corpus; of its two budgets, one that is None fills along with the other."""
        texts, sources = (self.written.build(), self.read.build()), to_numpy(self.sources)
        requests, ids = tuple(self.requests), to_numpy(self.request_ids)
        prompts: Counter[Prompt] = Counter()
        for (prompt, _), count in zip(requests, np.bincount(ids).tolist(), strict=True):
            prompts[prompt] += count
        written, read = (text.lengths.astype(np.int32) for text in texts)
        digest = hashlib.sha256()
        for values in (read, written, sources, *(text.values for text in texts)):
            digest.update(np.ascontiguousarray(values).data)
        names = [name for _, name in requests]
        if any(names):
            # They choose experts.
            digest.update(repr([names[index] for index in ids.tolist()]).encode())
        mixture = Mixture.of(mix, sources, read, unit="tokens")
        # What fills along with the other budget as pairs are drawn, and at least the longest's.
        whole = int(read.sum(dtype=np.int64))
        quotas = [round(share * whole) for share in mixture.asked]
        drawn = population(sources, read, quotas, seed=0, epoch=0)
        usual = read[drawn], written[drawn]
        rows, tokens = self.row_budget, self.token_budget
        if rows is None:
            assert tokens is not None
            rows = max(suggest_token_budget(UtteranceLengths(*usual[::-1]), tokens), read.max())
        if tokens is None:
            tokens = max(suggest_token_budget(UtteranceLengths(*usual), rows), written.max())
        rows, tokens = int(rows), int(tokens)
        shape = StaticShape(
            rows,
            tokens,
            max_sequences or max(8, -(-tokens // 8)),
            longest_frames=int(read.max()),
            longest_tokens=int(written.max()),
        )
        return TextCorpus(
            lengths=UtteranceLengths(read, written),
            shape=shape,
            dropped=tuple(self.dropped),
            sources=sources,
            mixture=mixture,
            fingerprint=digest.hexdigest(),
            prompt=prompts.most_common(1)[0][0],
            eos_id=self.tokenizer.eos_id,
            pad_id=self.tokenizer.pad_id,
            _ids=self.ids.build(),
            _read=texts[1],
            _written=texts[0],
            _prompt_lengths=to_numpy(self.prompt_lengths),
            _requests=requests,
            _request_ids=ids,
        )

    def _tokenize(self, pair: TextPair) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of the text encoder's input, of the decoder's prompt and of its target.

        Raises:
            Unfit: The pair cannot be trained on; carries the first reason.
        """
        if not pair.source or not pair.text:
            raise Unfit(Reason.EMPTY_TEXT, "the text or its translation is empty")
        tokenizer = self.tokenizer
        try:
            prompt = tokenizer.prompt(pair.prompt)
            read = tokenizer.encode(pair.source, pair.prompt.source)
            text = tokenizer.encode(pair.text, pair.prompt.target)
        except UnknownLanguageError as error:
            raise Unfit(Reason.UNKNOWN_LANGUAGE, str(error)) from error
        for tokens, spelt in ((read, pair.source), (text, pair.text)):
            tokenized = TokenizedText(prompt, tokens, False, tokenizer.count_unknown(tokens))
            if not spells_something(tokenized, tokenizer):
                raise Unfit(Reason.UNKNOWN_TEXT, f"the vocabulary spells nothing of {spelt[:60]!r}")
        count = len(prompt) + len(text)
        # Where a budget is derived, the other one limits both.
        to_read = self.row_budget or self.token_budget or 0
        to_write = self.token_budget or self.row_budget or 0
        if len(read) + 1 > to_read or count > to_write:
            limits = f"{to_write}" if to_read == to_write else f"{to_read} and {to_write}"
            raise Unfit(
                Reason.TOKEN_BUDGET,
                f"{len(read) + 1} tokens to read and {count} to write, over {limits}",
            )
        if self.max_positions is not None and count > self.max_positions:
            raise Unfit(Reason.MODEL, f"{count} tokens, over `max_positions` {self.max_positions}")
        return [*read, tokenizer.eos_id], prompt, text
