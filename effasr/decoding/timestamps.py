"""Timestamp tokens of Whisper: which may follow a text, and the parts of a text between them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from effasr.data.tokenizer import TimestampTokens, Tokenizer
from effasr.decoding.decoded import Decoded, TimedPart
from effasr.decoding.suppression import FORBIDDEN
from effasr.model.asr import ASRModel


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """Rules of https://github.com/openai/whisper (decoding.py, `ApplyTimestampRules`).

    A Canary has none: its times are of words.

    A text begins with a timestamp, of at most ``latest_initial``. Timestamps come in pairs, the end
    of a part and the beginning of the next, except before the end of the text, and never decrease;
    a part has a duration. Where all timestamps together are likelier than the likeliest other
    token, one of them is next.
    """

    tokens: TimestampTokens
    eos_id: int
    latest_initial: int | None  # number of a timestamp

    def applied(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return logits, float32 (N, V), after labels (N, steps); -1 is no label."""
        stamps, end = self.tokens, logits.shape[1]
        if stamps.marker is not None:
            return logits
        numbers = torch.arange(end, device=logits.device)
        said = labels >= 0
        count = said.sum(1)
        # Without a second label, the first may be thought to follow a timestamp.
        is_stamp = torch.nn.functional.pad(labels >= stamps.first, (2, 0))
        closes = is_stamp[:, -1] & ~is_stamp[:, -2] & (count > 1)
        opens = is_stamp[:, -1] & ~closes
        latest = torch.nn.functional.pad(labels, (1, 0), value=-1).amax(1)
        least = torch.where(latest >= stamps.first, latest + (~closes).long(), stamps.first)
        times = numbers >= stamps.first
        barred = times & (opens[:, None] | (numbers < least[:, None]))
        barred |= closes[:, None] & (numbers < self.eos_id)
        barred |= numbers == stamps.without
        first = times.logical_not()
        if self.latest_initial is not None:
            first = first | (numbers > stamps.first + self.latest_initial)
        barred |= (count == 0)[:, None] & first
        logits = logits.masked_fill(barred, FORBIDDEN)
        likelier = logits[:, stamps.first :].logsumexp(1) > logits[:, : stamps.first].amax(1)
        return logits.masked_fill(likelier[:, None] & ~times, FORBIDDEN)


def timestamp_rules(model: ASRModel, tokenizer: Tokenizer) -> TimestampRules:
    stamps = tokenizer.timestamps
    if stamps is None or model.config.decoder is None or model.vocab_size <= stamps.first:
        raise ValueError(
            "`timestamps` must be false, and `long_form` chunked, for a model that has no tokens "
            "of times such as <|0.00|> or <|0|>: `--words` finds the times of words with any model."
        )
    return TimestampRules(stamps, tokenizer.eos_id, model.config.decoder.max_initial_timestamp)


def with_parts_of_time(result: Decoded, stamps: TimestampTokens) -> Decoded:
    """Return a text without its timestamps, and the parts that they divide it into."""
    is_stamp = list(map(stamps.is_time, result.tokens))
    begins = [n + 1 for n in range(len(is_stamp) - 1) if is_stamp[n] and is_stamp[n + 1]]
    text: list[int] = []
    parts: list[TimedPart] = []
    for first, last in zip([0, *begins], [*begins, len(is_stamp)], strict=True):
        tokens, place = result.tokens[first:last], len(text)
        if not tokens:
            continue
        text += stamps.plain(tokens)
        start = stamps.seconds_of(tokens[0]) if is_stamp[first] else 0.0
        ends = len(tokens) > 1 and is_stamp[last - 1]
        end = stamps.seconds_of(result.tokens[last - 1]) if ends else None
        parts.append(TimedPart(start, end, place, len(text), tokens))
    return replace(result, tokens=tuple(text), parts=tuple(parts))


def without_context(prompt: Sequence[int], stamps: TimestampTokens) -> list[int]:
    """Return a prompt without the earlier text that it may begin with."""
    return list(prompt[0 if stamps.previous is None else prompt.index(stamps.start) :])
