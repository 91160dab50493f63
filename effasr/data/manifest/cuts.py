"""lhotse's cut manifests, and the folders that `effasr prepare` writes."""

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from lhotse import Recording, SupervisionSegment
from lhotse.cut import Cut, MixedCut
from lhotse.cut.data import DataCut
from lhotse.cut.set import deserialize_cut
from lhotse.utils import fastcopy

from effasr.data.audio.cut_sources import recordings
from effasr.data.audio.waveform import AudioSegment
from effasr.data.manifest.row import READ, ManifestRow, absolute, spaced
from effasr.data.manifest.times import shifted, with_times
from effasr.data.manifest.utterance import CutUtterance, LineFormat, ReadOptions, custom_fields
from effasr.data.prompt import Prompt
from effasr.untrusted.remote import is_url

CUTS_FILE = "cuts.jsonl.gz"  # file that identifies a prepared folder

_MAX_NUMBER = 2**53
"""Samples, and more than seconds, that a recording may have: floats are exact up to here."""
_MAX_CHANNEL = 1024
_NO_FILE = Path()
# Seconds by which a supervision may be shorter or longer than its cut: rounded times.
_SPAN_TOLERANCE = 0.1 + 1e-6

_TRIM = "use `cuts.trim_to_supervisions(keep_overlapping=False)`, before any `cut_into_windows`."

_SOURCE_TYPES = ("file", "memory", "shar")
_SUSPECT = re.compile(r"command|url|sph|opus|\\u", re.IGNORECASE)
"""A line without these, as most lines are, needs no closer look at its audio sources."""
_READ_BY_PROGRAMS = (".sph", ".opus")


def _detect(fields: Mapping[str, Any]) -> bool:
    return bool(fields.keys() & {"supervisions", "recording", "tracks"})


def parse(row: ManifestRow, options: ReadOptions) -> CutUtterance:
    cut = read_cut(row, "not a cut that lhotse can read")
    if options.untranscribed:
        # Give a cut without supervision, or without text, a supervision with an empty text.
        if isinstance(cut, DataCut) and not cut.supervisions and cut.recording is not None:
            cut.supervisions = [
                SupervisionSegment(
                    cut.id, cut.recording.id, 0.0, cut.duration, channel=cut.channel, text=""
                )
            ]
        if len(cut.supervisions) == 1 and cut.supervisions[0].text is None:
            cut.supervisions[0].text = ""
    cut = _spoken(cut, row)
    stated = _complete(cut, row, options.default)
    return CutUtterance(row.origin, cut, audio_of(cut), stated=frozenset(stated))


def _spoken(cut: Cut, row: ManifestRow) -> Cut:
    """Return the part of a cut that its supervision is about; its text is that part's alone."""
    if not isinstance(cut, DataCut) or len(cut.supervisions) != 1:
        return cut
    start, duration = cut.supervisions[0].start, cut.supervisions[0].duration
    for name, value in (("start", start), ("duration", duration)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise row.error(f"`{name}` of a supervision must be a number.", "supervisions")
    if not 0 < duration < _MAX_NUMBER:
        raise row.error(
            f"`duration` of a supervision must be greater than 0, but is {duration}.",
            "supervisions",
        )
    before, behind = -start, start + duration - cut.duration
    if max(before, behind) > _SPAN_TOLERANCE:
        raise row.error(
            f"cut {cut.id!r} has only a part of what its supervision says: "
            f"{max(before, 0) + max(behind, 0):.3f} s of {duration:.3f} s lie outside: {_TRIM}",
            "supervisions",
        )
    if max(-before, -behind) <= _SPAN_TOLERANCE:
        return cut
    part = cut.truncate(offset=max(start, 0.0), duration=min(duration, cut.duration - start))
    return part.with_id(cut.id)


FORMAT = LineFormat(_detect, parse)


def check_supervisions(row: ManifestRow, cut: str, supervisions: Any) -> None:
    """Check that a cut has the text of its audio, and no other."""
    count = len(supervisions) if isinstance(supervisions, list) else 0
    if count != 1:
        remedy = _TRIM if count else "it has no text, which `effasr label` writes by a model."
        raise row.error(
            f"{cut} must have one supervision, but has {count}: {remedy}", "supervisions"
        )


def read_cut(row: ManifestRow, refusal: str, *, allow_recording: bool = False) -> Cut:
    """Return the cut, or the recording, of a line, checked; file paths stay as they are."""
    _refuse_programs(row)
    values = dict(row.values)
    try:
        if allow_recording and "sources" in values:
            cut = Recording.from_dict(values).to_cut()
        else:
            cut = deserialize_cut(values)
        _check_values(cut)
    except Exception as error:  # lhotse does not validate; any exception may occur.
        problem = f"{type(error).__name__}: {error}"
        raise row.error(f"{refusal} ({problem}).") from error
    return cut


def make_absolute(cut: Cut, folder: Path) -> None:
    if isinstance(cut, DataCut) and cut.recording is not None:
        for source in cut.recording.sources:
            if source.type == "file" or is_url(source.source):
                source.source = absolute(str(source.source), folder)


def prompt_of(cut: Cut) -> Prompt:
    values = prompt_values(getattr(cut, "custom", None), cut.supervisions[0].language)
    return ManifestRow(values, _NO_FILE, 0, cut.id).prompt(Prompt())


def with_prompt(cut: Cut, prompt: Prompt) -> Cut:
    supervision = fastcopy(cut.supervisions[0], language=prompt.source)
    before = getattr(cut, "custom", None) or {}
    fields = {name: value for name, value in before.items() if name not in READ}
    custom = {**fields, **custom_fields(prompt, ("target_lang", "task", "pnc"))}
    return fastcopy(cut, supervisions=[supervision], custom=custom)


def prompt_values(custom: Mapping[str, Any] | None, spoken: str | None) -> dict[str, Any]:
    """Return the language of a supervision and the ``custom`` fields by NeMo's names."""
    return {**(custom or {}), **({"lang": spoken} if spoken else {})}


def json_line(cut: Cut) -> bytes:
    """Return ``cut.to_dict()`` as JSON, without the copies that it makes of each value twice."""
    if isinstance(cut, DataCut):
        document = {**_fields(cut), "type": type(cut).__name__}
    else:
        document = cut.to_dict()
    return json.dumps(document, ensure_ascii=False, default=_fields).encode()


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of an object of lhotse that are not None."""
    if getattr(value, "transforms", None):
        return value.to_dict()
    fields = ((name, getattr(value, name)) for name in _field_names(type(value)))
    return {name: field for name, field in fields if field is not None}


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def audio_of(cut: Cut | AudioSegment) -> str:
    """Return where the audio is, for messages."""
    if isinstance(cut, AudioSegment):
        return str(cut.path)
    assert isinstance(cut, DataCut)
    assert cut.recording is not None
    sources = cut.recording.sources
    return ", ".join(s.source if isinstance(s.source, str) else s.type for s in sources)


def _refuse_programs(row: ManifestRow) -> None:
    """Refuse audio that is the output of a program, or comes from a network.

    lhotse runs a source of type ``command`` in a shell when the audio is read; of type ``url`` it
    runs what begins with ``pipe:``, and opens connections. For ``.sph`` and, in older versions,
    ``.opus`` it starts a program in a shell with the name of the file; one such file alone is read
    without lhotse.
    """
    if not _SUSPECT.search(row.text):
        return
    values = dict(row.values)
    # lhotse reads what is not the recording of a simple cut, such as the tracks of a mixed one.
    simple = values if "sources" in values else values.get("recording")
    for recording in recordings(values):
        sources = recording["sources"]
        alone = recording is simple and len(sources) == 1 and not recording.get("transforms")
        for source in sources:
            kind = source.get("type") if isinstance(source, dict) else source
            if kind not in _SOURCE_TYPES:
                raise row.error(
                    f"an audio source must be of type {', '.join(_SOURCE_TYPES)}, but is "
                    f"{repr(kind)[:60]}: no program is run and nothing is downloaded; write the "
                    "audio to a file, and name that."
                )
            if not alone and str(source.get("source")).lower().endswith(_READ_BY_PROGRAMS):
                raise row.error(
                    "a recording of several files, with transforms, or in a mixed cut must not be "
                    "of .sph or .opus files, as lhotse reads these with other programs: convert "
                    "them to FLAC."
                )


def _check_values(cut: Cut) -> None:
    if not isinstance(cut.id, str):
        raise ValueError(f"`id` must be text, but is {repr(cut.id)[:60]}")
    if isinstance(cut, MixedCut):
        for track in cut.tracks:
            _check_values(track.cut)
    if not isinstance(cut, DataCut):
        return
    numbers = {"start": cut.start, "duration": cut.duration}
    if cut.recording is not None:
        numbers["recording.duration"] = cut.recording.duration
        numbers["recording.sampling_rate"] = cut.recording.sampling_rate
        numbers["recording.num_samples"] = cut.recording.num_samples
        if not isinstance(cut.recording.sources, list):
            raise ValueError("`recording.sources` must be a list")
        for source in cut.recording.sources:
            if not isinstance(source.channels, list):
                value_text = repr(source.channels)[:60]
                raise ValueError(f"`channels` of a source must be a list, but is {value_text}")
    for name, value in numbers.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < _MAX_NUMBER or (name != "start" and value == 0):
            raise ValueError(f"`{name}` must be a number above 0, but is {repr(value)[:60]}")
    channels = [cut.channel] if isinstance(cut.channel, int) else cut.channel
    if (
        not isinstance(channels, list | tuple)
        or not channels
        or not all(type(channel) is int and 0 <= channel < _MAX_CHANNEL for channel in channels)
    ):
        raise ValueError(f"`channel` must be numbers from 0, but is {repr(cut.channel)[:60]}")
    for supervision in cut.supervisions:
        if not isinstance(supervision.speaker, str | int | None):
            value_text = repr(supervision.speaker)[:60]
            raise ValueError(f"`speaker` of a supervision must be text, but is {value_text}")
        for item in chain.from_iterable((supervision.alignment or {}).values()):
            if not isinstance(item.symbol, str) or not 0 <= item.start <= item.end < _MAX_NUMBER:
                raise ValueError(f"`alignment` must have texts and times, but has {str(item)[:60]}")


def _complete(cut: Cut, row: ManifestRow, default: Prompt) -> set[str]:
    """Check a cut and fill in the fields that the project reads; return what the line states."""
    check_supervisions(row, f"cut {cut.id!r}", cut.supervisions)
    supervision = cut.supervisions[0]
    if not isinstance(supervision.text, str):
        raise row.error(
            f"cut {cut.id!r}: `supervisions[0].text` must be a string, but is "
            f"{supervision.text!r}.",
            "supervisions",
        )
    if not isinstance(cut, DataCut):
        raise row.error(
            f"cut {cut.id!r} must be a MonoCut or a MultiCut, but is a {type(cut).__name__}: save "
            "the mixed audio with `cuts.save_audios()`."
        )
    if cut.recording is None:
        raise row.error(f"cut {cut.id!r} has no recording: features are not read.", "recording")
    values = prompt_values(cut.custom, supervision.language)
    fields = ManifestRow(values, row.path, row.line, row.origin)
    prompt = fields.prompt(default)
    supervision.language = prompt.source
    supervision.text, alignment = with_times(row, spaced(supervision.text))
    supervision.alignment = shifted(alignment, cut.start) or supervision.alignment
    stated = fields.stated()
    cut.custom = {**(cut.custom or {}), **custom_fields(prompt, stated)}
    make_absolute(cut, row.path.parent)
    return stated
