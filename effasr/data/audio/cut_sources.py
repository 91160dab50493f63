"""Checks the audio files of cuts that lhotse reads, before lhotse opens them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from effasr.data.audio.audio_file import RATES, AudioError, AudioProblem, open_audio

if TYPE_CHECKING:
    from lhotse.cut import Cut


def check_sources(cut: Cut) -> None:
    """Check every audio file of a cut as `open_audio` does: of tracks and transforms, too.

    lhotse would wait for the writer of a pipe, and believes any header.
    """
    if cut.sampling_rate not in RATES:
        raise AudioError(
            AudioProblem.UNREADABLE,
            f"{cut.id}: `sampling_rate` must be from 1 kHz to 1 MHz, but is "
            f"{repr(cut.sampling_rate)[:60]}.",
        )
    # What is custom is not loaded.
    for recording in recordings(cut.to_dict(), left_out="custom"):
        for source in recording["sources"]:
            if source["type"] == "file":
                open_audio(str(source["source"])).close()


def recordings(value: Any, left_out: str | None = None) -> Iterator[dict[str, Any]]:
    """Yield all objects with audio sources in a document of plain values, at any depth."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, dict):
            if isinstance(one.get("sources"), list):
                yield one
            rest.extend(inner for key, inner in one.items() if key != left_out)
        elif isinstance(one, list):
            rest.extend(one)
