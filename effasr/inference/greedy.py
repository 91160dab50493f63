"""Decoding of a packed batch, and the greedy search of the attention decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from effasr.data.batch import Batch
from effasr.data.tokenizer import Tokenizer
from effasr.inference.beam import transducer_beam
from effasr.inference.ctc import ctc_greedy
from effasr.inference.ctc_alignment import Span, align_tokens
from effasr.inference.decoding_config import DecodingConfig
from effasr.inference.transducer import transducer_greedy
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence

_KEEP_ROWS = 7 / 8
"""Finished rows leave once no more than this share goes on: each leave copies what stays."""

_PARTS = {"attention": "decoder", "transducer": "transducer", "ctc": "CTC head"}
"""What of a model each method needs."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What was recognised in one utterance.

    Attributes:
        tokens: The transcript, without prompt and end.
        truncated: Whether the decoder was stopped before it said that the text ends.
        spans: Encoder frames of each token; None where they were not asked for, or where there
            are too few frames for the tokens.
    """

    tokens: tuple[int, ...]
    truncated: bool = False
    spans: tuple[Span, ...] | None = None


def choose_method(model: ASRModel, method: str, beam: int = 1) -> str:
    """Resolve ``auto``, and check that the model can be decoded in this way.

    Raises:
        ValueError: The model lacks what the method needs, or the method knows no beam.
    """
    has = {
        "attention": model.config.decoder is not None,
        "transducer": model.config.transducer is not None,
        "ctc": model.config.ctc,
    }
    if method == "auto":
        method = next(name for name, there in has.items() if there)
    if not has[method]:
        part = _PARTS[method]
        raise ValueError(f"`method` must not be {method}, because this model has no {part}.")
    if beam > 1 and method != "transducer":
        raise ValueError(
            f"`beam` must be 1 for the method {method}, but is {beam}: only a transducer has a "
            "beam search."
        )
    transducer = model.config.transducer
    if beam > 1 and transducer is not None and transducer.durations is not None:
        raise ValueError(
            f"`beam` must be 1 for a transducer with durations, but is {beam}: only greedy search "
            "knows how to skip frames."
        )
    return method


def check_words(model: ASRModel, config: DecodingConfig) -> None:
    """Check that the model can tell when words are said, if that is asked for.

    Raises:
        ValueError: It has no CTC head.
    """
    if config.words and not model.config.ctc:
        raise ValueError(
            "`words` must be false for a model without CTC head, which alone knows their times."
        )


@torch.no_grad()
def decode(
    model: ASRModel,
    tokenizer: Tokenizer,
    batch: Batch,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig | None = None,
) -> list[Decoded]:
    """Encode and decode a batch. The model must be in evaluation mode, on the batch's device.

    The result for an utterance does not depend on the others in the batch.

    Args:
        model: What to decode with.
        tokenizer: Of this model.
        batch: Its ``tokens`` and ``text`` are not read.
        prompts: What the decoder reads first, for each utterance of the batch; only the attention
            decoder reads them.
        config: The default configuration by default.

    Returns:
        One result for each of ``batch.ids``.

    Raises:
        ValueError: There is not one prompt per utterance, a prompt is empty or leaves no room for
            a transcript, or the model lacks what the method needs.
    """
    config = DecodingConfig() if config is None else config
    count = len(batch.ids)
    if len(prompts) != count:
        raise ValueError(f"`prompts` must be {count}, one per utterance, but are {len(prompts)}.")
    method = choose_method(model, config.method, config.beam)
    check_words(model, config)
    if not count:
        return []
    encoded = model.encode(batch)
    if method != "attention":
        texts = _aligned(model, method, encoded, config)
        decoded = [Decoded(tuple(tokens)) for tokens in texts[:count]]
    else:
        limits = [
            _limit(model, prompt, config.max_tokens(frames))
            for prompt, frames in zip(prompts, batch.frames.lengths, strict=False)
        ]
        decoded = attention_greedy(
            model, encoded, prompts, limits, tokenizer.eos_id, tokenizer.vocab_size
        )
    if not config.words:
        return decoded
    spans = align_tokens(model, encoded, [one.tokens for one in decoded])
    return [
        replace(one, spans=None if found is None else tuple(found))
        for one, found in zip(decoded, spans, strict=True)
    ]


def _aligned(
    model: ASRModel, method: str, encoded: PackedSequence, config: DecodingConfig
) -> list[list[int]]:
    """What CTC or the transducer finds in each sequence."""
    if method == "ctc":
        return ctc_greedy(model, encoded, blank_id=model.vocab_size)
    assert model.transducer is not None  # checked by choose_method
    if config.beam == 1:
        return transducer_greedy(model.transducer, encoded, config.max_symbols)
    limits = [config.max_tokens(frames) for frames in encoded.layout.lengths]
    return transducer_beam(model.transducer, encoded, config.beam, limits)


def attention_greedy(
    model: ASRModel,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    eos_id: int,
    classes: int | None = None,
) -> list[Decoded]:
    """Decode sequences of encoder output with the attention decoder and its caches.

    Prompts may differ in length: each row reads its own, then what it has said itself.

    Args:
        model: With a decoder.
        encoded: (T, C), from ``model.encode``; sequences past ``len(prompts)`` are not decoded.
        prompts: At least one token each.
        limits: The most tokens each may say after its prompt, at least one.
        eos_id: Ends a transcript.
        classes: How many of the model's classes are tokens, where not all are.

    Returns:
        One result for each prompt.
    """
    every = [_Row(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    if not every:
        return []
    state = model.start_decoding(encoded, max(len(row.prompt) + row.limit for row in every))
    if encoded.layout.num_sequences > len(every):
        state.keep(range(len(every)))
    rows, tokens = every, [row.prompt[0] for row in every]
    for position in count(1):
        hidden = model.decode_step(torch.tensor(tokens, device=encoded.values.device), state)
        likeliest = model.logits(hidden)[:, :classes].argmax(-1).tolist()
        tokens = [
            row.read(position, token, eos_id) for row, token in zip(rows, likeliest, strict=True)
        ]
        kept = [index for index, row in enumerate(rows) if not row.finished]
        if not kept:
            break
        if len(kept) <= _KEEP_ROWS * len(rows):
            state.keep(kept)
            rows, tokens = [rows[index] for index in kept], [tokens[index] for index in kept]
    return [Decoded(tuple(row.said), row.truncated) for row in every]


@dataclass(slots=True)
class _Row:
    """One utterance while it is decoded."""

    prompt: Sequence[int]
    limit: int
    said: list[int] = field(default_factory=list)
    finished: bool = False
    truncated: bool = False

    def read(self, position: int, likeliest: int, eos_id: int) -> int:
        """Take in what follows ``position`` tokens; return the token to read next."""
        if self.finished:
            return eos_id
        if position < len(self.prompt):
            return self.prompt[position]
        if likeliest == eos_id:
            self.finished = True
            return eos_id
        self.said.append(likeliest)
        self.finished = self.truncated = len(self.said) == self.limit
        return likeliest


def _limit(model: ASRModel, prompt: Sequence[int], wanted: int) -> int:
    """How many tokens may follow the prompt, within the positions that the decoder knows."""
    assert model.config.decoder is not None  # checked by choose_method
    if not prompt:
        raise ValueError("`prompts` must not be empty: the decoder starts from a token.")
    positions = model.config.decoder.max_positions
    if len(prompt) >= positions:
        raise ValueError(
            f"`prompts` must be shorter than the decoder's {positions} positions, "
            f"but one has {len(prompt)} tokens."
        )
    return min(wanted, positions - len(prompt))
