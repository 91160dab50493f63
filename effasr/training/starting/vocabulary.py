"""Starts a run from a model whose tokenizer is replaced."""

from __future__ import annotations

import logging
from pathlib import Path

from torch import Tensor

from effasr import checkpoint
from effasr.data.tokenizer.base import NoTokenizer, Tokenizer
from effasr.model.asr import ASRModel

TABLES = (
    *("ctc_head.weight", "ctc_head.bias"),
    *("decoder.embed_tokens.weight", "decoder.untied_weight", "decoder.output_bias"),
    *("text_encoder.embed_tokens.weight", "transducer.predictor.embedding.weight"),
    *("transducer.output.weight", "transducer.output.bias"),
)
"""Parameters with a row for each token, and after these one for each further class, if any."""

log = logging.getLogger(__name__)


def replaces_tokenizer(tokenizer: str, source: Path) -> bool:
    """Return whether ``data.tokenizer`` takes the place of the tokenizer of ``init_from``.

    A model that was pretrained on audio alone has none, and a language model keeps its own.
    """
    if not tokenizer or checkpoint.read_description(source).model.language_model is not None:
        return False
    return not isinstance(checkpoint.read_tokenizer(source), NoTokenizer)


def load_weights(model: ASRModel, source: Path, tokenizer: Tokenizer) -> None:
    """Load a model, but for the rows of tokens that its tokenizer lacks.

    The rows of pieces that both tokenizers have move to their new places; those of the others stay
    as they were initialised. All other weights are read, with those of the blank and of durations.

    Args:
        model: Initialised model with the vocabulary of ``tokenizer``.
        source: The model directory to start from.
        tokenizer: The tokenizer of the run.

    Raises:
        CheckpointError: The weights are damaged or of another architecture.
        ValueError: The decoder's settings name tokens of the vocabulary that is replaced.
    """
    description = checkpoint.read_description(source)
    decoder = model.config.decoder
    if decoder is not None and (decoder.suppress or decoder.begin_suppress):
        raise ValueError(
            "`data.tokenizer` must be left out where the decoder of `init_from` has tokens that "
            "are never written (model.decoder.suppress), whose numbers are those of its own "
            "tokenizer: set suppress and begin_suppress to [], or leave data.tokenizer out."
        )
    moves = shared_pieces(checkpoint.read_tokenizer(source), tokenizer)
    own = model.state_dict()

    def moved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        for name in weights.keys() & own.keys() & set(TABLES):
            weights[name] = _moved(
                weights[name], own[name], moves, description.vocab_size, tokenizer.vocab_size
            )
        return weights

    # A model to begin with may never have read text.
    checkpoint.load_weights(model, source, may_lack=("text_encoder.",), change=moved)
    log.warning(
        "the tokenizer of init_from is replaced: the model keeps its weights for %d of the %d "
        "pieces of data.tokenizer, and learns the others anew",
        len(moves),
        tokenizer.vocab_size,
    )


def shared_pieces(old: Tokenizer, new: Tokenizer) -> dict[int, int]:
    """Return the old id by the new id of each piece that both tokenizers have.

    A piece that is there several times, once for each language, is taken at its own number or at
    the first one.
    """
    before, first = old.pieces(), {}
    for number, piece in enumerate(before):
        first.setdefault(piece, number)
    return {
        number: number if before[number : number + 1] == [piece] else first[piece]
        for number, piece in enumerate(new.pieces())
        if piece in first
    }


def _moved(
    old: Tensor, initial: Tensor, moves: dict[int, int], old_size: int, new_size: int
) -> Tensor:
    """Return a table with the rows of known pieces, and of the classes after the pieces."""
    table = initial.clone()
    if len(old) - old_size == len(initial) - new_size and len(old) > old_size:
        table[new_size:] = old[old_size:]
    table[list(moves)] = old[list(moves.values())].to(table.dtype)
    return table
