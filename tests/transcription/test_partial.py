"""Recordings of which only a part is transcribed: interrupted ones, and damaged ones."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from effasr.decoding.config import DecodingConfig
from effasr.transcription.inputs.arrival import Interruption
from effasr.transcription.inputs.sources import Source
from effasr.transcription.outputs.writers import ResultWriter
from effasr.transcription.results import INTERRUPTED, Segment, Transcription
from effasr.transcription.transcribe import Waveform, transcribe

RATE = 16_000
SHORT = DecodingConfig(chunk_seconds=2.0, search_seconds=0.5, frame_budget=60)


@pytest.mark.parametrize("method", ["attention", "ctc"])
def test_an_interruption_keeps_what_is_decoded(model, tokenizer, noise, method) -> None:
    config = replace(SHORT, method=method)
    sources = [Waveform(str(n), noise(seconds, n), RATE) for n, seconds in enumerate((2, 60, 3))]
    first, whole, _ = transcribe(model, tokenizer, sources, config=config)
    seconds = 0.0

    def interrupt(decoded: float) -> None:
        nonlocal seconds
        seconds += decoded
        if seconds >= 20 and not interruption.requested:
            os.kill(os.getpid(), signal.SIGINT)

    with Interruption() as interruption:
        results = list(
            transcribe(
                model,
                tokenizer,
                sources,
                config=config,
                on_audio=interrupt,
                interruption=interruption,
            )
        )
    assert results[0] == first
    (part,) = results[1:]
    assert isinstance(part, Transcription)
    assert isinstance(whole, Transcription)
    assert part.partial == INTERRUPTED
    assert 5 <= part.duration < 50
    assert part.segments == whole.segments[: len(part.segments)]
    assert part.duration == part.segments[-1].end


MARKED = {
    "text": "a\tx y [partial: cut --> short]\n",
    "json": '"partial":"cut --> short"',
    "srt": "2\n00:00:02,000 --> 00:00:04,000\n[partial: cut -> short]\n",
    "vtt": "WEBVTT\n\nNOTE partial: cut -> short\n\n00:",
    "ctm": ";; a partial: cut --> short\na 1 ",
}


@pytest.mark.parametrize("style", MARKED)
def test_every_format_marks_a_part(style, tmp_path, capsys) -> None:
    segments = (Segment(0.0, 2.0, "x y"),)
    result = Transcription("a", 2.0, "x y", segments, partial="cut --> short")
    sources = [Source("a", "a", "a")]
    ResultWriter(style, None, sources).write(result)
    assert MARKED[style].replace('":"', '": "') in capsys.readouterr().out.replace('":"', '": "')
    writer = ResultWriter(style, tmp_path, sources)
    writer.write(Transcription("a", 2.0, "x y", segments, partial=INTERRUPTED))
    assert writer.missing(sources) == sources, "--continue transcribes it again"
    (file,) = tmp_path.iterdir()
    assert ".partial." in file.name
    assert "interrupted" in file.read_text()
    assert Path(file).suffix == {"text": ".txt"}.get(style, f".{style}")
