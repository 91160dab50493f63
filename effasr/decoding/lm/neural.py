"""Neural language models over the model's tokens, for shallow fusion."""

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.interop.huggingface.files import SAFETENSORS, read_weights
from effasr.model.language_model.architecture import CONFIG_FILE, check_sizes, model_config
from effasr.untrusted.documents import read_json_object

log = logging.getLogger(__name__)

Text = tuple[int, ...]

_ROWS = 64  # contexts that are computed at a time
_LONGEST = 1024  # most tokens of a context
_CACHE_BYTES = 64 << 20  # size of the cache of scores, which hypotheses of a beam share
_STATE_BYTES = 512 << 20
_MOST_TOKENS = 1 << 15  # tokens in the cache of keys and values; others are computed again
_FIRST_ROWS = 256  # of the cache of keys and values
_PASS_BYTES = 256 << 20  # bytes of keys and values that are read at a time


class NeuralLM:
    """A causal language model of transformers, as a `effasr.decoding.lm.ngram.TokenLM`.

    Texts begin with the model's ``bos_token_id``, or ``eos_token_id`` if it has none. Keys and
    values of the current contexts are cached, so that a longer context costs only its last token.
    With a model that cannot continue from a cache, and past its longest context, each context costs
    all of its tokens.
    """

    def __init__(self, model: Any, vocab_size: int, eos_id: int):
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
        # The beam requests contexts of this length; texts are shorter than the limit.
        self.order = min(_LONGEST, _LONGEST if positions is None else int(positions))
        self._model, self._begin, self._eos_id = model, int(begin), eos_id
        self._most = _CACHE_BYTES // (4 * vocab_size)
        self._scores: dict[Text, Tensor] = {}
        self._shapes, self._cache = _shapes(model, self._begin), None
        if self._shapes is None:
            log.warning(
                "the language model, %s, does not go on from the keys and values of a text: every "
                "token costs a pass over all the text before it",
                type(model).__name__,
            )
        else:
            like = next(model.parameters())
            self._width = sum(heads * width for heads, width in self._shapes)
            limit = min(_MOST_TOKENS, _STATE_BYTES // (self._width * like.element_size()))
            self._cache = PrefixCache(self._width, limit, like.dtype, like.device)

    def scores(self, contexts: Tensor, symbols: Tensor) -> Tensor:
        flat = [
            tuple(token for token in row if token >= 0)[-(self.order - 1) :]
            for row in contexts.flatten(0, 1).tolist()
        ]
        new = set(flat) - self._scores.keys()
        if self._cache is None:
            self._compute(new)
        else:
            self._continue(new, set(flat))
        rows = torch.stack([self._scores[context] for context in flat]).double()
        if len(self._scores) > self._most:
            self._scores = {context: self._scores[context] for context in flat}
        requested = symbols.flatten(0, 1).to(rows.device)
        ends = requested.new_full((len(requested), 1), self._eos_id)
        scores = rows.gather(1, torch.cat([requested, ends], 1))
        return scores.to(symbols.device).unflatten(0, symbols.shape[:2])

    @torch.no_grad()
    def _compute(self, contexts: set[Text]) -> None:
        """Score every token after each context, reading all of its tokens."""
        # One length at a time needs no padding, so a result does not depend on the other contexts.
        for length in sorted({len(context) for context in contexts}):
            same = sorted(context for context in contexts if len(context) == length)
            for begin in range(0, len(same), _ROWS):
                rows = same[begin : begin + _ROWS]
                texts = [(self._begin, *row) for row in rows]
                self._remember(rows, self._model(input_ids=self._ids(texts), use_cache=False))

    @torch.no_grad()
    def _continue(self, contexts: set[Text], requested: set[Text]) -> None:
        """Score every token after each context, continuing from its cached beginning."""
        assert self._cache is not None
        for length in sorted({len(context) + 1 for context in contexts}):
            same = [(self._begin, *row) for row in sorted(contexts) if len(row) + 1 == length]
            by_length = defaultdict(list)
            for text in same:
                by_length[self._cache.cached_length(text)].append(text)
            rows = max(1, min(_ROWS, _PASS_BYTES // (4 * self._width * length)))
            for cached_length, texts in by_length.items():
                for begin in range(0, len(texts), rows):
                    self._pass(texts[begin : begin + rows], cached_length, requested)

    def _pass(self, texts: Sequence[Text], cached_length: int, requested: set[Text]) -> None:
        """Read what follows the ``known`` tokens of texts of one length."""
        from transformers import DynamicCache

        assert self._cache is not None
        assert self._shapes is not None
        past = DynamicCache()
        if cached_length:
            cached = self._cache.read([text[:cached_length] for text in texts])
            parts = cached.split([heads * width for heads, width in self._shapes], dim=2)
            parts = [
                part.unflatten(2, shape).transpose(1, 2)
                for part, shape in zip(parts, self._shapes, strict=True)
            ]
            for layer, (keys, values) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
                past.update(keys, values, layer)
        ids = self._ids([text[cached_length:] for text in texts])
        self._remember([text[1:] for text in texts], _read_on(self._model, ids, past))
        if len(texts[0]) == self.order:
            # The next context loses its first token, which changes all positions.
            return
        states = [part[:, :, cached_length:].transpose(1, 2).flatten(2) for part in _parts(past)]
        new = torch.cat(states, 2)
        if not self._cache.write(texts, new):
            self._cache.keep([(self._begin, *context) for context in requested])
            self._cache.write(texts, new)

    def _ids(self, texts: Sequence[Text]) -> Tensor:
        return torch.tensor(texts, device=next(self._model.parameters()).device)

    def _remember(self, contexts: Sequence[Text], output: Any) -> None:
        """Cache the scores after each context, float32 (V,)."""
        for row, scores in zip(contexts, output.logits[:, -1].float().log_softmax(-1), strict=True):
            # A view would keep the scores of all other contexts alive.
            self._scores[row] = scores.clone()


def _read_on(model: Any, ids: Tensor, cache: Any) -> Any:
    """Read tokens behind those of a cache, which gets their keys and values."""
    # Its name since transformers 5.24, which warns of the other one.
    is_new_name = "cache" in signature(model.forward).parameters
    return model(
        input_ids=ids, use_cache=True, **{"cache" if is_new_name else "past_key_values": cache}
    )


def _parts(cache: Any) -> list[Tensor]:
    """Return keys and values of each layer, (texts, heads, tokens, width) each."""
    return [part for layer in cache.layers for part in (layer.keys, layer.values)]


@torch.no_grad()
def _shapes(model: Any, token: int) -> list[tuple[int, int]] | None:
    """Return heads and width of each layer's cache; None if it has another form or other scores."""
    from transformers import DynamicCache

    device, past = next(model.parameters()).device, DynamicCache()
    ids = torch.tensor([[token] * 3, [token] * 3], device=device)
    try:
        expected = model(input_ids=ids, use_cache=False).logits[:, -1]
        _read_on(model, ids[:, :2], past)
        parts = _parts(past)
        shapes = [(part.shape[1], part.shape[3]) for part in parts]
        if not parts or any(part.shape[::2] != (2, 2) for part in parts):
            return None
        scores = _read_on(model, ids[:, 2:], past).logits[:, -1]
        if any(part.shape[2] != 3 for part in _parts(past)):
            return None
    except Exception:  # What models without a cache raise differs from one to the other.
        return None
    is_same = torch.allclose(scores, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    return shapes if is_same else None


def load_neural_lm(
    directory: str | Path, vocab_size: int, eos_id: int, device: torch.device | str = "cpu"
) -> NeuralLM:
    """Read a folder for ``AutoModelForCausalLM`` offline: config.json and safetensors, no code."""
    directory = Path(directory)
    try:
        import transformers
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ValueError(
            f"`lm` {directory} is a folder, a model of transformers, which is not installed: "
            "pip install 'effasr[huggingface]', or give an ARPA file."
        ) from error
    disable_progress_bar()
    try:
        path = directory / CONFIG_FILE
        config = model_config(json.dumps(read_json_object(path)), str(path), causal=True)
        check_sizes(config, path)
        weights = read_weights(directory, SAFETENSORS)
        kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        # Without the directory, in which it would look for weights and settings of other kinds.
        model = kind.from_pretrained(None, config=config, state_dict=weights)
    except Exception as error:  # Sizes that do not fit each other fail anywhere in transformers.
        first = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ValueError(
            f"`lm` {directory} must be a folder of a causal language model, as transformers "
            f"writes it, but is not: {first[0]}"
        ) from None
    return NeuralLM(model.eval().float().to(device), vocab_size, eos_id)


class PrefixCache:
    """Keys and values of tokens, by their whole prefix.

    The hypotheses of a beam share most of their tokens. Each token of the tree of texts has one row
    of a tensor here, so that nothing is copied when the beam keeps, repeats or drops a hypothesis.
    """

    def __init__(self, width: int, limit: int, dtype: torch.dtype, device: torch.device) -> None:
        self._limit = limit
        self._rows = torch.empty(min(limit, _FIRST_ROWS), width, dtype=dtype, device=device)
        self._free = list(range(len(self._rows)))
        self._rows_of: dict[Text, tuple[int, ...]] = {}  # of the tokens of each text

    def __len__(self) -> int:
        return len(self._rows_of)

    def cached_length(self, text: Text) -> int:
        """Return the length of the longest cached prefix of a text, without its last token."""
        for length in range(len(text) - 1, 0, -1):
            if text[:length] in self._rows_of:
                return length
        return 0

    def read(self, beginnings: Iterable[Text]) -> Tensor:
        """Return keys and values of cached prefixes of one length: (texts, tokens, width)."""
        rows = [self._rows_of[text] for text in beginnings]
        return self._rows[torch.tensor(rows, device=self._rows.device)]

    def write(self, texts: Sequence[Text], values: Tensor) -> bool:
        """Cache the last tokens, (texts, tokens, width), after cached prefixes, if they fit."""
        count, ends = values.shape[1], range(len(texts[0]) - values.shape[1], len(texts[0]))
        # Two new texts may share a prefix.
        new = {
            text[: end + 1]: row * count + column
            for row, text in enumerate(texts)
            for column, end in enumerate(ends)
            if text[: end + 1] not in self._rows_of
        }
        if not self._make_room(len(new)):
            return False
        rows = [self._free.pop() for _ in new]
        for text, row in zip(new, rows, strict=True):
            self._rows_of[text] = (*self._rows_of.get(text[:-1], ()), row)
        device = self._rows.device
        source = torch.tensor(list(new.values()), dtype=torch.int64, device=device)
        self._rows[torch.tensor(rows, dtype=torch.int64, device=device)] = values.flatten(0, 1)[
            source
        ]
        return True

    def keep(self, texts: Iterable[Text]) -> None:
        used: set[int] = set()
        for text in texts:
            cached = text if text in self._rows_of else text[: self.cached_length(text)]
            used.update(self._rows_of.get(cached, ()))
        self._rows_of = {text: rows for text, rows in self._rows_of.items() if rows[-1] in used}
        self._free = [row for row in range(len(self._rows)) if row not in used]

    def _make_room(self, tokens: int) -> bool:
        """Grow up to the limit, for this many more tokens."""
        if len(self._free) >= tokens:
            return True
        size = len(self._rows)
        grown = min(self._limit, max(2 * size, size + tokens - len(self._free)))
        if grown - size + len(self._free) < tokens:
            return False
        self._rows = torch.cat(
            [self._rows, self._rows.new_empty(grown - size, self._rows.shape[1])]
        )
        self._free += range(size, grown)
        return True
