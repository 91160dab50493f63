"""Checks the audio files of cuts that lhotse reads, before lhotse opens them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from effasr.data.audio.audio_file import RATES, AudioError, AudioProblem, open_audio

if TYPE_CHECKING:
    from lhotse.cut import Cut


def check_sources(cut: "Cut") -> None:
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
    remainder = [value]
    while remainder:
        item = remainder.pop()
        if isinstance(item, dict):
            if isinstance(item.get("sources"), list):
                yield item
            remainder.extend(inner for key, inner in item.items() if key != left_out)
        elif isinstance(item, list):
            remainder.extend(item)
