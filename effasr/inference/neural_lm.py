"""Neural language models over the model's own tokens, for shallow fusion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ROWS = 64
"""Contexts that are computed at a time."""
_LONGEST = 1024
"""Tokens of a context at most."""
_CACHE_BYTES = 64 << 20
"""Of continuations that are remembered: hypotheses of a beam have contexts in common."""


class NeuralLM:
    """A causal language model of transformers: what follows the last tokens.

    A `effasr.inference.language_model.TokenLM`. The text begins with the
    model's ``bos_token_id``, or ``eos_token_id`` where it has none. A context that was scored once
    is remembered, but nothing of it is used to score a longer one: the cost grows with the square
    of the text, which suits small models and short utterances.

    Attributes:
        order: One more than the tokens of the longest context.
    """

    def __init__(self, model: Any, vocab_size: int, eos_id: int):
        """Take a model.

        Args:
            model: A causal language model of transformers, in evaluation mode.
            vocab_size: V, of the speech model's tokens.
            eos_id: The token that ends a text.

        Raises:
            ValueError: Its vocabulary is another one, or nothing tells how a text begins.
        """
        config = model.config
        if config.vocab_size != vocab_size:
            raise ValueError(
                f"`lm` must have the speech model's vocabulary of {vocab_size} tokens, but has "
                f"{config.vocab_size}: train it on texts that this model's tokenizer has encoded."
            )
        begin = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
        if begin is None or not 0 <= begin < vocab_size:
            raise ValueError(
                "`lm` must have a `bos_token_id` or an `eos_token_id` in its vocabulary of "
                f"{vocab_size}, which begins its texts, but has {begin}."
            )
        positions = getattr(config, "max_position_embeddings", None)
        # The beam asks for contexts of this length; texts are shorter than the most.
        self.order = min(_LONGEST, _LONGEST if positions is None else int(positions))
        self._model, self._begin, self._eos_id = model, int(begin), eos_id
        self._most = _CACHE_BYTES // (4 * vocab_size)
        self._known: dict[tuple[int, ...], Tensor] = {}

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        """Score what may follow: see `effasr.inference.language_model.TokenLM.scores`."""
        flat = [
            tuple(token for token in row if token >= 0)[-(self.order - 1) :]
            for row in contexts.flatten(0, 1).tolist()
        ]
        self._compute(set(flat) - self._known.keys())
        rows = torch.stack([self._known[context] for context in flat]).double()
        if len(self._known) > self._most:
            self._known = {context: self._known[context] for context in flat}
        asked = symbols.flatten(0, 1).to(rows.device)
        ends = asked.new_full((len(asked), 1), self._eos_id)
        found = rows.gather(1, torch.cat([asked, ends], 1))
        return found.to(symbols.device).unflatten(0, symbols.shape[:2])

    @torch.no_grad()
    def _compute(self, contexts: set[tuple[int, ...]]) -> None:
        """Score every token behind each context: float32 (V,) each."""
        device = next(self._model.parameters()).device
        # Of one length at a time: no padding, so no result depends on what else is asked for.
        for length in sorted({len(context) for context in contexts}):
            same = sorted(context for context in contexts if len(context) == length)
            for begin in range(0, len(same), _ROWS):
                rows = same[begin : begin + _ROWS]
                ids = torch.tensor([[self._begin, *row] for row in rows], device=device)
                logits = self._model(input_ids=ids, use_cache=False).logits[:, -1]
                for row, scores in zip(rows, logits.float().log_softmax(-1), strict=True):
                    self._known[row] = scores


def load_neural_lm(
    directory: str | Path, vocab_size: int, eos_id: int, device: torch.device | str = "cpu"
) -> NeuralLM:
    """Read a directory that ``AutoModelForCausalLM`` loads, without reaching for any network.

    Raises:
        ValueError: transformers is not installed, it is no such directory, or its vocabulary is
            another one than the speech model's.
    """
    directory = Path(directory)
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise ValueError(
            f"`lm` {directory} is a folder, a model of transformers, which is not installed: "
            "pip install 'effasr[huggingface]', or give an ARPA file."
        ) from error
    logging.disable_progress_bar()
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))["model_type"]
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(
            f"`lm` {directory} must be a folder of a causal language model, as transformers "
            f"writes it, but is not: {first[0]}"
        ) from None
    return NeuralLM(model.eval().float().to(device), vocab_size, eos_id)
