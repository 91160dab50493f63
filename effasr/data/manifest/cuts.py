"""Reads lhotse's cut manifests, and the folders that `effasr prepare` writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lhotse import SupervisionSegment
from lhotse.cut import Cut, MixedCut
from lhotse.cut.data import DataCut
from lhotse.cut.set import deserialize_cut

from effasr.data.audio.waveform import AudioSegment
from effasr.data.manifest.audio_sources import refuse_programs
from effasr.data.manifest.fields import prompt_fields
from effasr.data.manifest.lines import parse_object
from effasr.data.manifest.utterance import CutUtterance, absolute, custom_fields
from effasr.data.prompt import Prompt

CUTS_FILE = "cuts.jsonl.gz"
"""File that identifies a prepared folder."""

_LONGEST = 2**53
"""Samples, and more than seconds, that a recording may have: floats count to here."""

_CHANNELS = 1024


def utterances(
    lines: Iterable[tuple[int, str]], path: Path, language: str, *, untranscribed: bool = False
) -> Iterator[CutUtterance]:
    """Read the numbered lines of a cut manifest; relative audio paths are relative to its folder.

    With ``untranscribed`` a cut may have no supervision, or one without text.

    Raises:
        ValueError: A line is no cut, or has not exactly one supervision with a text.
    """
    for number, line in lines:
        origin = f"{path}:{number}"
        row = parse_object(line, origin)
        refuse_programs(row, line, origin)
        try:
            cut = deserialize_cut(row)
            check_times(cut)
        except Exception as error:  # lhotse checks little, and raises many kinds.
            raise ValueError(
                f"{origin}: not a cut that lhotse can read ({type(error).__name__}: {error})."
            ) from error
        if untranscribed:
            _supervise(cut)
        _complete(cut, origin, path.parent, language)
        yield CutUtterance(origin, cut, audio_of(cut))


def cut_prompt(cut: Cut, origin: str, language: str) -> Prompt:
    """Return the request that a cut's supervision and ``custom`` fields make.

    Raises:
        ValueError: The fields contradict each other.
    """
    own: dict[str, Any] = dict(getattr(cut, "custom", None) or {})
    spoken = cut.supervisions[0].language
    row = {**own, "lang": spoken} if spoken else own
    # lhotse's `language` is what is spoken: as a `source_lang` it never stands for the target.
    return prompt_fields({"source_lang": spoken or own.get("lang"), **row}, origin, language)


def check_times(cut: Cut) -> None:
    """Check the values that lhotse takes as they are.

    Raises:
        ValueError: One is of a wrong type, or no time.
    """
    if not isinstance(cut.id, str):
        raise ValueError(f"`id` must be text, but is {repr(cut.id)[:60]}")
    if isinstance(cut, MixedCut):
        for track in cut.tracks:
            check_times(track.cut)
    if not isinstance(cut, DataCut):
        return
    times = {"start": cut.start, "duration": cut.duration}
    if cut.recording is not None:
        times["recording.duration"] = cut.recording.duration
        times["recording.sampling_rate"] = cut.recording.sampling_rate
        times["recording.num_samples"] = cut.recording.num_samples
        if not isinstance(cut.recording.sources, list):
            raise ValueError("`recording.sources` must be a list")
        for source in cut.recording.sources:
            if not isinstance(source.channels, list):
                shown = repr(source.channels)[:60]
                raise ValueError(f"`channels` of a source must be a list, but is {shown}")
    for name, value in times.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < _LONGEST or (name != "start" and value == 0):
            raise ValueError(f"`{name}` must be a number above 0, but is {repr(value)[:60]}")
    channels = [cut.channel] if isinstance(cut.channel, int) else cut.channel
    if (
        not isinstance(channels, list | tuple)
        or not channels
        or not all(type(channel) is int and 0 <= channel < _CHANNELS for channel in channels)
    ):
        raise ValueError(f"`channel` must be numbers from 0, but is {repr(cut.channel)[:60]}")
    for supervision in cut.supervisions:
        if not isinstance(supervision.speaker, str | int | None):
            shown = repr(supervision.speaker)[:60]
            raise ValueError(f"`speaker` of a supervision must be text, but is {shown}")


def _supervise(cut: Cut) -> None:
    """Give a cut without supervision, or without text, a supervision with an empty text."""
    if isinstance(cut, DataCut) and not cut.supervisions and cut.recording is not None:
        cut.supervisions = [
            SupervisionSegment(
                cut.id, cut.recording.id, 0.0, cut.duration, channel=cut.channel, text=""
            )
        ]
    if len(cut.supervisions) == 1 and cut.supervisions[0].text is None:
        cut.supervisions[0].text = ""


def _complete(cut: Cut, origin: str, folder: Path, language: str) -> None:
    """Check a cut and fill in the fields that the project reads."""
    if len(cut.supervisions) != 1:
        raise ValueError(
            f"{origin}: cut {cut.id!r} must have one supervision, but has "
            f"{len(cut.supervisions)}: use `cuts.trim_to_supervisions()`."
        )
    supervision = cut.supervisions[0]
    if not isinstance(supervision.text, str):
        raise ValueError(
            f"{origin}: cut {cut.id!r}: `supervisions[0].text` must be a string, "
            f"but is {supervision.text!r}."
        )
    if not isinstance(cut, DataCut):
        raise ValueError(
            f"{origin}: cut {cut.id!r} must be a MonoCut or a MultiCut, but is a "
            f"{type(cut).__name__}: save the mixed audio with `cuts.save_audios()`."
        )
    if cut.recording is None:
        raise ValueError(f"{origin}: cut {cut.id!r} has no recording: features are not read.")
    prompt = cut_prompt(cut, origin, language)
    supervision.language, supervision.text = prompt.source, supervision.text.strip()
    cut.custom = {**(cut.custom or {}), **custom_fields(prompt)}
    for source in cut.recording.sources:
        if source.type == "file":
            source.source = absolute(str(source.source), folder)


def audio_of(cut: Cut | AudioSegment) -> str:
    """Return the path of a cut's or segment's audio, for messages."""
    if isinstance(cut, AudioSegment):
        return str(cut.path)
    assert isinstance(cut, DataCut)
    assert cut.recording is not None
    sources = cut.recording.sources
    return ", ".join(s.source if isinstance(s.source, str) else s.type for s in sources)
