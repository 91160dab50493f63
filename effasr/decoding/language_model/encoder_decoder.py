"""Answers of an encoder-decoder model: what its decoder reads, and its cache of transformers."""

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from effasr.model.language_model.encoder_decoder import EncoderDecoder
from effasr_kernels import PackedSequence


class EncodedConversations:
    """Conversations that an encoder has read; see `CachedConversations`.

    The rows of a batch of transformers' decoders have one position, so all enter together.
    """

    page_bytes = 0

    def __init__(self, model: EncoderDecoder, rows: int) -> None:
        self._model, self._count = model, rows
        # Its name since transformers 5.24, which warns of the other one.
        is_new_name = "cache" in signature(model.model.decoder.forward).parameters
        self._argument = "cache" if is_new_name else "past_key_values"
        self._hidden = self._memory = self._is_row = torch.zeros(0)
        self._cache: Any = None

    @property
    def lengths(self) -> Sequence[int]:
        return range(self._count)

    def reserve(self, *limits: int | None) -> None:
        """Make no room: the cache grows."""

    def release(self, rows: Sequence[int]) -> None:
        """Leave rows in the batch, where nothing reads them."""

    def admit(self, rows: Sequence[int], x: PackedSequence) -> None:
        """Begin with these conversations, each the encoder's output and the first decoder row."""
        from transformers import DynamicCache, EncoderDecoderCache

        inputs = x.values.split(x.layout.lengths)
        empty = x.values[:0]
        by_row = dict(zip(rows, inputs, strict=True))
        sources = [by_row[row][:-1] if row in by_row else empty for row in range(self._count)]
        first = [by_row[row][-1] if row in by_row else x.values[0] for row in range(self._count)]
        self._memory = pad_sequence(sources, batch_first=True)
        lengths = torch.tensor([len(source) for source in sources], device=x.values.device)
        positions = torch.arange(self._memory.shape[1], device=x.values.device)
        self._is_row = positions < lengths[:, None]
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        self._run(torch.stack(first))

    def logits(self) -> Tensor:
        return self._model.logits(self._hidden).float()

    def read(self, tokens: Sequence[int]) -> None:
        ids = torch.tensor(tokens, device=self._memory.device)
        self._run(self._model.embed_tokens(ids))

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(rows, device=self._memory.device)
        self._count = len(rows)
        self._cache.batch_select_indices(index)
        self._memory, self._is_row = self._memory[index], self._is_row[index]
        self._hidden = self._hidden[index]

    def extend(self, rows: int) -> list[int]:
        self._count += rows
        return list(range(self._count - rows, self._count))

    def _run(self, x: Tensor) -> None:
        options = {self._argument: self._cache, "use_cache": True}
        hidden = self._model.write(x[:, None], self._memory, self._is_row, **options)
        self._hidden = hidden[:, 0]
