"""NeMo's manifests: JSON lines with ``audio_filepath``, ``duration`` and ``text``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from effasr.data.audio.embedded import Embedded
from effasr.data.manifest.row import AUDIO, END, IDS, SPEAKER, START, TEXT, ManifestRow, unread
from effasr.data.manifest.times import with_times
from effasr.data.manifest.utterance import FileUtterance, LineFormat, ReadOptions


def _detect(fields: Mapping[str, Any]) -> bool:
    return "audio_filepath" in fields or (
        not fields.keys().isdisjoint(AUDIO) and not fields.keys().isdisjoint((*TEXT, "duration"))
    )


def parse(row: ManifestRow, options: ReadOptions) -> FileUtterance:
    audio = row.audio(row.first(AUDIO))
    name = row.name(IDS)
    offset, duration = row.span()
    field = options.text_column or row.first(TEXT)
    text = row.transcript(field, untranscribed=options.untranscribed)
    text, alignment = with_times(row, text)
    return FileUtterance(
        id=name or Path(audio).stem,
        named=name is not None,
        origin=row.origin,
        audio=audio,
        text=text,
        alignment=alignment,
        prompt=row.prompt(options.default),
        stated=frozenset(row.stated()),
        offset=offset,
        duration=duration,
        channel=row.channel(),
        speaker=row.name(SPEAKER),
    )


def parse_embedded(
    row: ManifestRow, place: Embedded, name: str, options: ReadOptions
) -> FileUtterance:
    """Return the utterance of a line whose audio is inside another file."""
    row.values = {**row.values, "audio_filepath": place.path}
    utterance = parse(row, options)
    return replace(utterance, id=utterance.id if utterance.named else name, embedded=place)


def parse_whole(
    row: ManifestRow, text_name: str, place: Embedded, name: str, options: ReadOptions
) -> FileUtterance:
    """Return the utterance that an embedded recording is.

    Other names of it and its span are those in the recording from which it was cut.
    """
    if options.unread is not None:
        times = (name for name in (*START, *END) if row.values.get(name) is not None)
        options.unread.update({*unread(row.values, text_name), *times})
    values = {key: row.values[key] for key in row.values.keys() - {*AUDIO, *START, *END, *TEXT}}
    text = row.values.get(text_name)
    if text_name in row.values:
        values["text"] = text
    row.values = values
    utterance = parse_embedded(row, place, name, replace(options, text_column=None))
    # Each is a recording of its own, though the id may be that of a sentence which several read.
    return replace(utterance, named=False)


def text_of_several(row: ManifestRow, options: ReadOptions, others: Sequence[str] = ()) -> str:
    """Return the name of a row's text; several that differ are an error of the whole source."""
    if options.text_column is not None:
        return options.text_column
    names = [name for name in (*others, *TEXT) if row.values.get(name) not in (None, "")]
    if len({" ".join(str(row.values[name]).split()) for name in names}) > 1:
        raise ValueError(
            f"{row.origin}: has texts that differ, {' and '.join(map(repr, names))}: choose by "
            f"`--text-column {names[0]}`, or in training by data.text_column={names[0]}."
        )
    # An empty text, if there is one, is still that of the row.
    return next(iter(names), next((name for name in TEXT if name in row.values), TEXT[0]))


def _parse_line(row: ManifestRow, options: ReadOptions) -> FileUtterance:
    if options.unread is not None:
        options.unread.update(unread(row.values, options.text_column or row.first(TEXT)))
    return parse(row, options)


FORMAT = LineFormat(_detect, _parse_line)
