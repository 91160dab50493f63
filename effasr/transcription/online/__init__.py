"""Recognition of streams frame by frame, by encoders that are trained with limited contexts."""

from effasr.transcription.online.recognizer import (
    OnlineRecognizer,
    OnlineStream,
    online_recognizer,
    transcribe_online,
)
from effasr.transcription.online.streamable import context_for, is_streamable

__all__ = [
    "OnlineRecognizer",
    "OnlineStream",
    "context_for",
    "is_streamable",
    "online_recognizer",
    "transcribe_online",
]
