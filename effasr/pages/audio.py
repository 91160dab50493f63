"""Players of utterances in a page."""

import base64
import io
import os
from collections.abc import Collection, Iterator
from html import escape
from pathlib import Path
from urllib.parse import quote

import soundfile
from lhotse.cut import Cut

from effasr.data.audio.audio_file import AudioError
from effasr.data.audio.waveform import AudioSegment, load_audio
from effasr.data.features.frame_geometry import SAMPLE_RATE
from effasr.data.manifest.reader import named
from effasr.pages.markup import lead

_MOST_BYTES = 6_000_000  # of audio in a page
_MOST_SECONDS = 60.0  # of an utterance whose audio is in a page

NOTE = lead(
    f"Up to {_MOST_BYTES / 1e6:g} MB of audio are in this page, as FLAC of {SAMPLE_RATE // 1000} "
    f"kHz; players of others, and of more than {_MOST_SECONDS:g} s, open the file where it lies "
    "relative to the page."
)


class Players:
    def __init__(self, page: Path) -> None:
        self._folder = page.absolute().parent
        self._bytes_left = _MOST_BYTES

    def player(self, cut: Cut) -> str:
        part = AudioSegment.of(cut)
        problem = "its file cannot be linked"
        if cut.duration <= _MOST_SECONDS and self._bytes_left > 0:
            try:
                file = io.BytesIO()
                soundfile.write(file, load_audio(part or cut), SAMPLE_RATE, format="FLAC")
            except AudioError as error:
                return f"<p>no audio: {escape(str(error))}</p>"
            content = file.getvalue()
            if len(content) <= self._bytes_left:
                self._bytes_left -= len(content)
                return _element(f"data:audio/flac;base64,{base64.b64encode(content).decode()}")
        if part is None or not isinstance(part.path, str):
            return f"<p>no audio: {problem}</p>"
        link = quote(os.path.relpath(part.path, self._folder))
        # A browser plays the part of a longer recording.
        return _element(f"{link}#t={part.start:g},{part.start + part.duration:g}")


def _element(source: str) -> str:
    return f'<audio controls preload="none" src="{escape(source)}"></audio>'


def cuts_of(
    manifest: str | Path, wanted: Collection[str], language: str = "en"
) -> Iterator[tuple[str, Cut]]:
    """Yield the named utterances of a manifest, as far as they can be opened."""
    missing = set(wanted)
    for name, utterance in named(manifest, language=language, untranscribed=True):
        if name in missing:
            missing.discard(name)
            try:
                yield name, utterance.cut(name)
            except AudioError:
                continue
        if not missing:
            return
