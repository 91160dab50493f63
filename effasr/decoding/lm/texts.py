"""Log-probabilities of whole texts by a language model over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from effasr.decoding.lm.ngram import TokenLM


def log_probs_of_texts(lm: TokenLM, texts: Sequence[Sequence[int]]) -> list[float]:
    """Return the log-probability of each text and its end, in nats.

    It is the sum that shallow fusion adds to the score of a transcript, before its weight.

    Args:
        lm: The language model.
        texts: Token ids of each text.
    """
    longest = max(map(len, texts), default=0)
    length = max(1, min(lm.order, longest))
    contexts, symbols = [], []
    for text in texts:
        for count in range(len(text) + 1):
            said = text[max(0, count - length) : count]
            contexts.append([*[-1] * (length - len(said)), *said])
            # After the last token only the end is scored, whatever the symbol.
            symbols.append([text[count] if count < len(text) else 0])
    if not texts:
        return []
    rows, asked = torch.tensor(contexts)[:, None], torch.tensor(symbols)[:, None]
    found = lm.scores(rows, asked)[:, 0].tolist()
    totals, place = [], 0
    for text in texts:
        own = found[place : place + len(text) + 1]
        totals.append(sum(token for token, _ in own[:-1]) + own[-1][1])
        place += len(own)
    return totals
