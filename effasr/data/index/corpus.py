"""All utterances of a run, in arrays that worker processes share."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from lhotse.cut import Cut

from effasr.checks import check
from effasr.data.audio.waveform import AudioError, AudioSegment, load_at, name_at
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate, with_experts
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import FASTCONFORMER, SAMPLE_RATE, Framing
from effasr.data.filters.config import check_share
from effasr.data.index.base_corpus import BaseCorpus, digest, nothing_left
from effasr.data.index.columns import AudioColumns, Ragged
from effasr.data.index.index_reader import Reader, build_table
from effasr.data.index.selection import Selection, Selector
from effasr.data.index.utterance_table import UtteranceTable
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import TimestampTokens, Tokenizer

if TYPE_CHECKING:
    from effasr.data.index.text_corpus import TextCorpus


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corpus(BaseCorpus):
    """Utterances that can be trained on; made by `Corpus.load`.

    ``lengths.tokens`` of an utterance without text are those that are reserved for a label.
    """

    _audio: AudioColumns
    _tokens: Ragged
    _times: Ragged
    _stamps: TimestampTokens | None
    _speakers: np.ndarray
    _rows: np.ndarray  # of the columns above
    _speeds: np.ndarray  # number of each utterance's speed in ``_all_speeds``
    _all_speeds: tuple[float, ...]
    _prompt_lengths: np.ndarray
    _monotonic: np.ndarray
    _prompts: tuple[Prompt, ...]
    _prompt_ids: np.ndarray
    _silence: np.ndarray | None = None  # samples of silence of each utterance
    assumed: int = 0  # utterances whose lines name no language

    @classmethod
    def load(
        cls,
        paths: Sequence[str | Path],
        tokenizer: Tokenizer,
        config: DataConfig,
        *,
        ctc: bool = True,
        transducer: bool = False,
        max_frames: int | None = None,
        max_positions: int | None = None,
        framing: Framing = FASTCONFORMER,
        sources: Sequence[int] | None = None,
        read: Reader = build_table,
    ) -> "Corpus":
        """Read manifests, tokenize their texts and drop utterances that cannot be trained on.

        Audio files are opened only for formats other than lhotse's. ``ctc`` limits the tokens by
        the frames, ``transducer`` gives lattices a budget, ``max_frames`` and ``max_positions`` are
        what the model can read and write. ``sources`` has the source of each manifest among the
        leaves of ``config.mix``; ``read`` is `build_table` or a cache of it.
        """
        sources = [0] * len(paths) if sources is None else sources
        limits = config.limits(
            ctc=ctc, max_frames=max_frames, max_positions=max_positions, framing=framing
        )
        # The token budget is applied after reading: a change of it then needs no new reading.
        table = read(
            paths, tokenizer, replace(limits, token_budget=None), config.assumed_language, sources
        )
        selector = Selector(
            table.columns(config.speeds),
            config,
            limits,
            zip(table.dropped_before.tolist(), table.dropped, strict=True),
        )
        if not selector.is_kept.any():
            raise nothing_left(paths, "no utterance can be trained on", selector.dropped)
        stamps, rule = tokenizer.timestamps, "be none where the tokenizer or the data have no times"
        has_times = stamps is not None and not transducer and len(table.times.values) > 0
        remedy = "fine-tune a Whisper, or a Canary with tokens such as <|0|>, on data with times"
        is_valid = config.timestamps == "none" or has_times
        check(is_valid, "data.timestamps", rule, config.timestamps, remedy)
        prompt_counts = np.bincount(table.prompt_ids[selector.is_kept])
        selection = selector.select(transducer=transducer)
        utterances = len(table) + len(table.dropped)
        check_share(selection.dropped, utterances, config.filters.max_dropped)
        if selection.mixture is not None:
            selection.mixture.check(sources)
        return cls._of(table, selection, tokenizer, config, int(prompt_counts.argmax()))

    @classmethod
    def _of(
        cls,
        table: UtteranceTable,
        selection: Selection,
        tokenizer: Tokenizer,
        config: DataConfig,
        prompt_id: int,
    ) -> "Corpus":
        selected, lengths, speeds = selection.rows, selection.lengths, config.speeds
        rows, prompt_ids = table.rows[selected], table.prompt_ids[selected]
        columns = [lengths.frames, lengths.tokens]
        extra = [] if selection.mixture is None else [selection.sources]
        if speeds != (1.0,):
            extra += [np.array(speeds), table.speeds[selected]]
        if selection.silence is not None:
            extra.append(selection.silence)
        if config.timestamps != "none":
            extra += table.times.blocks(rows)
        monotonic = np.array([prompt.monotonic for prompt in table.prompts])
        return cls(
            lengths=lengths,
            shape=selection.shape,
            dropped=selection.dropped,
            seconds=float(selection.seconds.sum()),
            samples=selection.samples,
            sources=selection.sources,
            mixture=selection.mixture,
            fingerprint=digest(chain(columns, table.tokens.blocks(rows), extra)),
            prompt=table.prompts[prompt_id],
            eos_id=tokenizer.eos_id,
            pad_id=tokenizer.pad_id,
            _audio=table.audio,
            _tokens=table.tokens,
            _times=table.times,
            _stamps=tokenizer.timestamps,
            _speakers=table.speakers,
            _rows=rows,
            _speeds=table.speeds[selected],
            _all_speeds=speeds,
            _prompt_lengths=table.prompt_lengths[selected],
            _monotonic=monotonic[prompt_ids] & (table.token_lengths[selected] > 0),
            _prompts=tuple(table.prompts),
            _prompt_ids=prompt_ids,
            _silence=selection.silence,
            assumed=int(table.assumed[selected].sum()),
        )

    @property
    def amounts(self) -> np.ndarray:
        return self.samples

    @property
    def durations(self) -> tuple[float, float] | None:
        if not len(self.samples):
            return None
        half, most = np.quantile(self.samples, (0.5, 1.0)) / SAMPLE_RATE
        return round(float(half), 3), round(float(most), 3)

    def collate(
        self, examples: Sequence[Example], shape: StaticShape | None, *, padded: bool = False
    ) -> Batch:
        batch = collate(
            examples,
            shape,
            eos_id=self.eos_id,
            pad_id=self.pad_id,
            padded=padded,
            framing=self.shape.framing,
        )
        return batch if self.experts is None else with_experts(batch)

    def with_text(self, text: "TextCorpus") -> "Corpus":
        """Return the same utterances with text pairs for text-only micro-batches."""
        both = hashlib.sha256(f"{self.fingerprint} {text.fingerprint}".encode())
        dropped = (*self.dropped, *text.dropped)
        return replace(self, text=text, dropped=dropped, fingerprint=both.hexdigest())

    def with_experts(self, number: Callable[[Prompt], int]) -> "Corpus":
        """Return the same utterances, with the expert of each by its prompt."""
        used = np.unique(self._prompt_ids)
        by_prompt = np.zeros(len(self._prompts), dtype=np.int64)
        by_prompt[used] = [number(self._prompts[index]) for index in used.tolist()]
        return replace(self, experts=by_prompt[self._prompt_ids])

    @property
    def speakers(self) -> int:
        return int((np.unique(self._speakers[self._rows]) >= 0).sum())

    @property
    def text_lengths(self) -> np.ndarray:
        """Tokens of each text without its prompt, int32 (n,)."""
        return self.lengths.tokens - self._prompt_lengths

    @property
    def monotonic(self) -> np.ndarray:
        return self._monotonic

    def token_ids(self, vocab_size: int) -> np.ndarray:
        seen = np.zeros(vocab_size, dtype=bool)
        for tokens in self._tokens.blocks(self._rows):
            seen[tokens] = True
        return np.flatnonzero(seen)

    def count_unknown(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """Return how many tokens the tokenizer does not know, and how many there are."""
        stamps = tokenizer.timestamps  # ids that a Whisper's tokenizer need not list
        listed = 0 if stamps is None else stamps.first + stamps.count
        ids = range(max(tokenizer.vocab_size, listed))
        unknown = np.array([bool(tokenizer.count_unknown([number])) for number in ids])
        counts = [
            (int(unknown[block].sum()), len(block)) for block in self._tokens.blocks(self._rows)
        ]
        return sum(count for count, _ in counts), sum(total for _, total in counts)

    def audio(self, index: int) -> AudioSegment | Cut:
        """Return the audio of an utterance: a segment of a file, or a cut that lhotse must read.

        For an utterance with speed perturbation this is the original audio.
        """
        return self._audio[self._rows[index]]

    def speed(self, index: int) -> float:
        return self._all_speeds[self._speeds[index]]

    def name(self, index: int) -> str:
        """Return the id of an utterance, with its speed factor as a suffix unless it is 1."""
        return name_at(self._audio.name(self._rows[index]), self.speed(index))

    def transcripts(self, limit: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield frames and token ids, int (U,), of transcriptions evenly spaced over the corpus."""
        chosen = np.flatnonzero(self._monotonic)
        if len(chosen) > limit:
            chosen = chosen[np.arange(limit) * len(chosen) // limit]
        for index in chosen.tolist():
            tokens = self._tokens[self._rows[index]][self._prompt_lengths[index] :]
            spoken = tokens if self._stamps is None else self._stamps.plain(tokens.tolist())
            yield int(self.lengths.frames[index]), np.array(spoken, dtype=tokens.dtype)

    def silence(self, index: int) -> int:
        return 0 if self._silence is None else int(self._silence[index])

    def example(self, index: int) -> Example:
        name = self.name(index)
        try:
            audio = load_at(self.audio(index), self.speed(index))
        except AudioError as error:
            raise AudioError(error.problem, f"utterance {name!r}: {error}") from error
        tokens = self._tokens[self._rows[index]].tolist()
        expert = None if self.experts is None else int(self.experts[index])
        if not tokens:
            room = int(self.lengths.tokens[index])
            return Example(name, audio, [], None, reserved=room, expert=expert)
        split = int(self._prompt_lengths[index])
        follows = bool(self._monotonic[index])
        example = Example(name, audio, tokens[:split], tokens[split:], follows, expert=expert)
        return self.timed(example, index)

    def timed(self, example: Example, index: int, delay: float = 0.0) -> Example:
        """Return an utterance with the times at its speed, after so many seconds of silence."""
        times = self._times[self._rows[index]]
        if not len(times) or self._stamps is None or example.text is None:
            return example
        text = self._stamps.timed(example.text, (times / self.speed(index) + delay).tolist())
        return replace(example, text=text, spoken=self._stamps.plain(text))
