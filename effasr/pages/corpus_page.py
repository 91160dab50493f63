"""The page of a corpus: lengths, rates, characters, levels, duplicates, outliers, filters."""

import os
import random
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from lhotse.cut import Cut

from effasr.data.audio.audio_file import AudioError
from effasr.data.audio.loudness import is_speech, loudness
from effasr.data.audio.waveform import AudioSegment, load_audio
from effasr.data.checksums import sha256
from effasr.data.filters.rules import rate_outliers, text_of
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.prepare import REPORT_FILE
from effasr.data.manifest.reader import named
from effasr.data.scripts import split_words
from effasr.data.tokenizer import Tokenizer
from effasr.pages.audio import NOTE, Players, cuts_of
from effasr.pages.markup import (
    Cell,
    charts,
    document,
    histogram,
    isolated,
    item,
    lead,
    paragraph,
    table,
)
from effasr.untrusted.documents import read_json_object

_DECODED = 200  # utterances whose audio is measured
_HASHED = 2_000  # files of equal length that are compared
_CLIPPED = 0.999, 3  # of full scale, in so many samples in a row
_ROWS, _OUTLIERS, _CHARACTERS, _RARE = 20, 8, 200, 5
_TEXT = 300  # characters of a text that are shown
_FILTERS = {
    "data.max_duration": (10, 20, 30, 40),
    "data.min_duration": (0.5, 1.0),
    "data.filters.max_characters_per_second": (20, 25, 30),
    "data.filters.max_tokens_per_second": (10, 20, 30),
    "data.filters.rate_deviations": (3, 4, 5),
}


@dataclass(slots=True)
class _Corpus:
    amounts: dict[str, array]  # seconds, characters, words, and with a tokenizer tokens
    ids: list[str] = field(default_factory=list)
    languages: list[str] = field(default_factory=list)
    speakers: Counter[str] = field(default_factory=Counter)  # utterances of each
    formats: Counter[str] = field(default_factory=Counter)
    letters: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[str, str]] = field(default_factory=dict)  # of each character
    texts: Counter[str] = field(default_factory=Counter)
    parts: Counter[AudioSegment] = field(default_factory=Counter)
    files: dict[Any, set[str]] = field(default_factory=dict)  # by rate and length
    sample: list[Cut] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # of utterances that cannot be opened

    def add(self, cut: Cut, tokenizer: Tokenizer | None, generator: random.Random) -> None:
        content, prompt = text_of(cut), prompt_of(cut)
        measured = {"seconds": cut.duration, "characters": len(content)}
        measured["words"] = len(split_words(content))
        if tokenizer is not None:
            knows = not tokenizer.languages or tokenizer.knows(prompt.target)
            measured["tokens"] = len(tokenizer.encode(content, prompt.target)) if knows else 0
        for name, amount in measured.items():
            self.amounts.setdefault(name, array("d")).append(amount)
        self.ids.append(cut.id)
        pair = prompt.source, prompt.target
        self.languages.append(pair[0] if prompt.monotonic else ">".join(pair))
        self.speakers[cut.supervisions[0].speaker or ""] += 1
        self.letters.update(content)
        for letter in set(content) - self.examples.keys():
            self.examples[letter] = cut.id, content
        self.texts[content] += 1
        recording = getattr(cut, "recording", None)
        if recording is not None:
            self.formats[f"{recording.sampling_rate} Hz, channels: {recording.num_channels}"] += 1
        if recording is not None and (part := AudioSegment.of(cut)) is not None:
            self.parts[part] += 1
            length = recording.num_samples, recording.sampling_rate
            self.files.setdefault(length, set()).add(str(part.path))
        # Each utterance is in the sample with the same probability.
        if len(self.sample) < _DECODED:
            self.sample.append(cut)
        elif (slot := generator.randrange(len(self.ids))) < _DECODED:
            self.sample[slot] = cut

    def of(self, name: str) -> np.ndarray:
        return np.array(self.amounts[name])

    def rates(self) -> dict[str, np.ndarray]:
        """Return characters, words and tokens a second."""
        return {
            name: self.of(name) / np.maximum(self.of("seconds"), 1e-3)
            for name in self.amounts
            if name != "seconds"
        }


def corpus_page(
    source: Path,
    page: Path,
    *,
    tokenizer: Tokenizer | None = None,
    language: str = "en",
    progress: Callable[[int], None] = lambda count: None,
) -> str:
    """Return the page; it links audio relative to the file that it will be."""
    corpus, generator = _Corpus({}), random.Random(0)
    utterances = named(source, language=language, untranscribed=True)
    for count, (name, utterance) in enumerate(utterances, 1):
        try:
            corpus.add(utterance.cut(name), tokenizer, generator)
        except AudioError as error:
            corpus.problems.append(str(error))
        progress(count)
    if not corpus.ids:
        first = f" The first: {corpus.problems[0]}" if corpus.problems else ""
        raise ValueError(f"{source}: no utterance can be opened.{first}")
    seconds = corpus.of("seconds")
    speakers = len(corpus.speakers.keys() - {""})
    tiles = [
        ("utterances", f"{len(corpus.ids):,}", f"{len(corpus.problems):,} cannot be opened"),
        ("hours", f"{seconds.sum() / 3600:,.2f}", f"{seconds.min():.2f} to {seconds.max():.2f} s"),
        ("speakers", f"{speakers:,}", f"{corpus.speakers['']:,} utterances name none"),
        ("characters", f"{len(corpus.letters):,}", "different ones"),
    ]
    sections = {
        "Lengths and rates": _lengths(corpus),
        "Languages, speakers, formats": _groups(corpus),
        "Characters": _characters(corpus),
        "Silence and clipping": _levels(corpus),
        "Duplicates": _duplicates(corpus),
        "Outliers": _outliers(corpus, source, language, Players(page)),
        "Filters": _filters(corpus, source),
    }
    return document(source.absolute().name, tiles, sections)


def _histogram(title: str, values: Sequence[float] | np.ndarray, unit: str = "") -> str:
    """Return bars between the half percents at both ends, which are in the outermost bars."""
    values = np.asarray(values, dtype=np.float64)
    low, high = np.quantile(values, (0.005, 0.995))
    low = min(low, 0.0) if low < high / 2 else low
    counts, edges = np.histogram(np.clip(values, low, high), bins=40, range=(low, high + 1e-9))
    first, middle, last = np.quantile(values, (0.05, 0.5, 0.95))
    caption = f"{title}: median {middle:.3g}, 90 % from {first:.3g} to {last:.3g}{unit}"
    return histogram(caption, edges.tolist(), counts.tolist(), unit)


def _lengths(corpus: _Corpus) -> str:
    note = "The outermost bars have all that is shorter, longer, slower or faster, half a percent."
    pictures = [_histogram("Seconds", corpus.of("seconds"), " s")]
    for name, rates in corpus.rates().items():
        pictures.append(_histogram(f"{name.capitalize()} a second", rates))
    return lead(note) + charts(*pictures)


def _groups(corpus: _Corpus) -> str:
    seconds, rates = corpus.of("seconds"), corpus.rates()["characters"]
    rows = []
    for name in sorted(set(corpus.languages)):
        chosen = np.array([language == name for language in corpus.languages])
        hours, rate = seconds[chosen].sum() / 3600, float(np.median(rates[chosen]))
        rows.append((name, int(chosen.sum()), round(hours, 3), round(rate, 1)))
    names = "language", "utterances", "hours", "characters a second, median"
    content = table(names, rows, sortable=True)
    content += table(("format", "utterances"), corpus.formats.most_common())
    speakers = [(Cell(isolated(name or "-")), n) for name, n in corpus.speakers.most_common(_ROWS)]
    title = f"The {len(speakers)} speakers with most utterances, of {len(corpus.speakers):,}."
    return content + table(("speaker", "utterances"), speakers, caption=title)


def _characters(corpus: _Corpus) -> str:
    order = corpus.letters.most_common()
    usual = [letter for letter in order if letter[1] > _RARE]
    listed = " ".join(
        f"<code>{isolated(letter if letter.strip() else unicodedata.name(letter, 'blank'))}</code>"
        f"&nbsp;{n:,}"
        for letter, n in usual[:_CHARACTERS]
    )
    rare = order[len(usual) :][::-1]
    rows = [
        (
            Cell(f"<code>{isolated(letter)}</code>"),
            f"U+{ord(letter):04X} {unicodedata.name(letter, '').lower()}",
            count,
            Cell(": ".join(isolated(part[:_TEXT]) for part in corpus.examples[letter])),
        )
        for letter, count in rare[:_CHARACTERS]
    ]
    title = f"{len(rare):,} characters occur at most {_RARE} times, of which {len(rows)} are shown."
    names = "character", "name", "times", "example"
    content = table(names, rows, caption=title, sortable=True) if rows else ""
    return f'<p class="pair">{listed}</p>{content}'


def _levels(corpus: _Corpus) -> str:
    silences, levels, clipped = [], [], []
    for cut in corpus.sample:
        try:
            audio = load_audio(cut, cut.sampling_rate)
        except AudioError:
            continue
        powers = loudness(audio, cut.sampling_rate)
        silences.append(100 * (1 - is_speech(powers).mean()))
        levels.append(powers.max())
        level, samples = _CLIPPED
        in_row = np.convolve(np.abs(audio) >= level, np.ones(samples))
        clipped += [cut.id] if in_row.max() >= samples else []
    if not silences:
        return paragraph("No audio of the sample can be decoded.")
    note = (
        f"Measured in {len(silences):,} of {len(corpus.ids):,} utterances, drawn at random; "
        f"{len(corpus.sample) - len(silences)} more cannot be decoded. Clipped, with "
        f"{_CLIPPED[1]} samples of full scale in a row: {len(clipped)}"
    )
    note += f", such as {', '.join(clipped[:5])}." if clipped else "."
    silence = _histogram("Percent that is no speech", silences, " %")
    return lead(note) + charts(silence, _histogram("Loudest 50 ms", levels, " dB"))


def _duplicates(corpus: _Corpus) -> str:
    alike = [file for files in corpus.files.values() if len(files) > 1 for file in sorted(files)]
    compared = [file for file in alike if os.path.isfile(file)][:_HASHED]
    different = len({sha256(Path(file)) for file in compared})
    repeated = [(text, n) for text, n in corpus.texts.most_common(_ROWS) if n > 1 and text]
    spoken = len(corpus.ids) - corpus.texts[""]
    content = paragraph(
        f"{spoken - len(corpus.texts.keys() - {''}):,} utterances repeat the text of another; "
        f"{corpus.texts['']:,} have none. "
        f"{corpus.parts.total() - len(corpus.parts):,} are the same part of the same file as "
        f"another. {len(compared) - different:,} files are copies of another: compared were "
        f"{len(compared):,} of {len(alike):,} that are as long as another."
    )
    rows = [(Cell(isolated(text[:_TEXT])), count) for text, count in repeated]
    return content + (table(("text", "times"), rows) if rows else "")


def _outliers(corpus: _Corpus, source: Path, language: str, players: Players) -> str:
    rates, seconds = corpus.rates()["characters"], corpus.of("seconds")
    by_rate, by_length = np.argsort(rates, kind="stable"), np.argsort(seconds, kind="stable")
    by_rate = by_rate[rates[by_rate] > 0]
    chosen = {
        "Most text a second": by_rate[::-1],
        "Least text a second": by_rate,
        "Longest": by_length[::-1],
        "Shortest": by_length,
    }
    indices = {title: order[:_OUTLIERS].tolist() for title, order in chosen.items()}
    wanted = {corpus.ids[index] for order in indices.values() for index in order}
    cuts = dict(cuts_of(source, wanted, language))
    content = NOTE
    for title, order in indices.items():
        content += f"<h3>{title}</h3>"
        for index in order:
            cut = cuts[corpus.ids[index]]
            facts = f"{seconds[index]:.2f} s, {rates[index]:.1f} characters a second"
            shown = f'<p class="pair">{isolated(text_of(cut)[:_TEXT])}</p>{players.player(cut)}'
            content += item(cut.id, facts, shown)
    return content


def _filters(corpus: _Corpus, source: Path) -> str:
    names = "filter", "utterances", "hours", "example"
    content = table(names, _would_take(corpus), caption="What a filter would take.")
    if not (source / REPORT_FILE).is_file():
        return content
    report = read_json_object(source / REPORT_FILE)
    rows = [
        (reason, share["utterances"], round(share["hours"], 3), report["examples"].get(reason))
        for reason, share in report["by_reason"].items()
    ]
    title = "What `effasr prepare` has dropped; dropped.jsonl lists each."
    return content + table(names, rows, caption=title)


def _would_take(corpus: _Corpus) -> Iterator[tuple[Any, ...]]:
    seconds, rates = corpus.of("seconds"), corpus.rates()
    languages = np.unique(corpus.languages, return_inverse=True)[1]
    by = rates.get("tokens", rates["characters"])
    spoken = by > 0

    def taken(name: str, limit: float) -> np.ndarray:
        if name.endswith("_duration"):
            return seconds > limit if "max" in name else seconds < limit
        if name.endswith("_per_second"):
            return rates["tokens" if "tokens" in name else "characters"] > limit
        outliers = np.zeros(len(seconds), dtype=bool)
        outliers[spoken] = rate_outliers(by[spoken], seconds[spoken], limit, languages[spoken])
        return outliers

    for name, limits in _FILTERS.items():
        # Training counts tokens, which only a tokenizer tells.
        note = " (by characters)" if "deviations" in name and "tokens" not in rates else ""
        for limit in limits if "tokens" not in name or "tokens" in rates else ():
            chosen = taken(name, limit)
            first = corpus.ids[int(chosen.argmax())] if chosen.any() else None
            hours = round(float(seconds[chosen].sum()) / 3600, 3)
            yield f"{name}={limit}{note}", int(chosen.sum()), hours, first
