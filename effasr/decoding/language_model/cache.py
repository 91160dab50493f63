"""Language model that reads conversations whole, and then row by row from a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effasr.data.conversation.batch import ConversationBatch
from effasr.model.asr import ASRModel
from effasr.model.cost import language_model_sizes
from effasr.model.language_model.model import LanguageModel
from effasr.model.language_model.packed_attention import PackedContext
from effasr.nn.cache.contiguous import CacheSizes, ContiguousCache


@dataclass(frozen=True, slots=True)
class _StepContext:
    """Each new row attends to itself and to the cached rows of its conversation."""

    cache: ContiguousCache
    longest: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """See `effasr.model.language_model.packed_attention.AttentionContext.attend`."""
        sizes, group = self.cache.sizes, q.shape[1] // k.shape[1]
        new = torch.stack([k, v], 1).to(sizes.dtype)
        if scale is not None:
            # The cache multiplies scores by its own factor.
            q = q * (scale * sizes.head_dim**0.5)
        # To the cache, heads that share keys are several queries of a row.
        queries = q.unflatten(1, (-1, group)).transpose(1, 2).flatten(0, 1).to(sizes.dtype)
        y = self.cache.attend(layer, queries, new)
        return y.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2).to(v.dtype)


class CachedConversations:
    """Conversations that a language model has read, and continues token by token.

    Rows are hypotheses, at first one for each conversation.
    """

    def __init__(self, model: ASRModel, batch: ConversationBatch) -> None:
        """Read a batch; the model is in evaluation mode, on the batch's device.

        Raises:
            ValueError: The model has no language model.
        """
        language_model = model.language_model
        if language_model is None:
            raise ValueError("`model` must have a language model, but has none.")
        self._model: LanguageModel = language_model
        sizes, device = language_model_sizes(language_model.config), batch.tokens.values.device
        count = len(batch.ids)
        encoded = model.encode(batch).values if sum(batch.clip_counts) else None
        x = language_model.embed(batch, encoded)
        dtype = x.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        shape = CacheSizes(sizes.layers, sizes.key_heads, sizes.head_dim, dtype, device)
        self._cache = ContiguousCache(shape, count, ahead=True)
        self._lengths = list(batch.tokens.layout.lengths[:count])
        write = self._cache.loader(range(count), self._lengths)
        layout = batch.tokens.layout
        context = PackedContext(layout, observe=write)
        hidden = language_model.run(x, layout.positions(), context)
        self._hidden = hidden[layout.cu_seqlens[1 : count + 1].long() - 1]

    @property
    def lengths(self) -> Sequence[int]:
        """Rows of the language model that each hypothesis has read."""
        return self._lengths

    def logits(self) -> Tensor:
        """Return the logits of the next token of each hypothesis: (N, V) float32."""
        return self._model.logits(self._hidden).float()

    def read(self, tokens: Tensor) -> None:
        """Read one more token of each hypothesis: int64 (N,)."""
        device = tokens.device
        positions = torch.tensor(self._lengths, device=device)
        self._lengths = [length + 1 for length in self._lengths]
        self._cache.look(self._lengths, grouped=False)
        x = self._model.embed_tokens(tokens)
        context = _StepContext(self._cache, max(self._lengths))
        self._hidden = self._model.run(x, positions, context)

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these hypotheses, which may repeat and take any order."""
        index = torch.tensor(rows, dtype=torch.int64, device=self._hidden.device)
        self._cache.reorder(index)
        self._hidden = self._hidden[index]
        self._lengths = [self._lengths[row] for row in rows]
