"""Transcribes a recording, and says by how many bytes that made the process grow."""

import json
import resource
import sys
import threading
from pathlib import Path

from effasr.checkpoint import load_model
from effasr.decoding.config import DecodingConfig
from effasr.transcription.results import Transcription
from effasr.transcription.transcribe import transcribe


def main() -> None:
    folder, warm_up, path = sys.argv[1:]
    loaded = load_model(folder)
    # A budget as small machines have it; the audio that is held at a time follows from it.
    # The bursts of noise in the recording are no speech to a network.
    config = DecodingConfig(method="ctc", frame_budget=1000, workers=1, vad="loudness")
    (first,) = transcribe(loaded.model, loaded.tokenizer, [warm_up], config=config)
    assert isinstance(first, Transcription), first
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (result,) = transcribe(loaded.model, loaded.tokenizer, [path], config=config)
    assert isinstance(result, Transcription), result
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    row = {
        "grown": grown * 1024,
        "duration": result.duration,
        "segments": len(result.segments),
        "words": len(result.text.split()),
        "end": result.segments[-1].end,
        "threads": threading.active_count(),
    }
    Path(folder, "grown.json").write_text(json.dumps(row))


if __name__ == "__main__":
    main()
