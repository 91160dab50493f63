"""Reads the weights that a run starts from, and selects those that are trained."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from effasr import checkpoint
from effasr.data.tokenizer import Tokenizer, load_tokenizer
from effasr.data.tokenizer.base import NO_TOKENIZER_FILE
from effasr.model.asr import ASRModel
from effasr.nn.experts import ExpertFeedForward
from effasr.nn.lora import adapt
from effasr.nn.parameters import freeze
from effasr.training.checkpointing.resume import Saved
from effasr.training.config import TrainConfig

TOKEN_TABLES = (
    *("ctc_head.weight", "ctc_head.bias"),
    *("decoder.embed_tokens.weight", "decoder.untied_weight", "decoder.output_bias"),
    *("text_encoder.embed_tokens.weight", "transducer.predictor.embedding.weight"),
    *("transducer.output.weight", "transducer.output.bias"),
)
"""Parameters with a row for each token, and after these one for each further class, if any."""

_OUTPUTS = {
    "ctc": ("ctc_head",),
    "decoder": ("decoder", "projection"),
    "transducer": ("transducer",),
}
"""Outputs of a model, which may be others than those of ``init_from``, and their parts."""

_FIRST_LOGITS = 1e-3  # factor of the router that an upcycled Switch begins with

log = logging.getLogger(__name__)


def prepare_weights(
    model: ASRModel, config: TrainConfig, source: Path | None, saved: Saved | None
) -> None:
    """Read the weights of a model directory, add adapters, and set which parameters are trained.

    A run that is resumed has its adapters in its checkpoint.
    """
    if saved is not None:
        assert source is not None
        _select_trained(model, config, saved.state["step"])
        checkpoint.load_weights(model, source)
        return
    # Parts that are initialised by the seed, and so have to be trained.
    initialised: list[str] = []
    if joins_language_model(config, source):
        _join(model, config, source)
        initialised = ["language_model.adapter"]
    elif source is not None:
        source_model = checkpoint.read_description(source).model
        before, after = (
            {output for output in _OUTPUTS if getattr(x, output)}
            for x in (source_model, model.config)
        )
        if (source / checkpoint.TOKENIZER / NO_TOKENIZER_FILE).is_file():
            before = set()  # It was pretrained on audio alone.
        initialised = [part for output in after - before for part in _OUTPUTS[output]]
        if source_model.text_encoder is None:
            # A model to begin with may never have read text.
            initialised.append("text_encoder")
        modules = (name for name, _ in model.named_children() if name not in initialised)
        only = tuple(f"{name}." for name in modules)
        if before & after and replaces_tokenizer(config.data.tokenizer, source):
            _load_for_tokenizer(model, source, load_tokenizer(config.data.tokenizer), only)
            parameters = dict(model.named_parameters())
            initialised += [name for name in TOKEN_TABLES if name in parameters]
        else:
            checkpoint.load_weights(model, source, only=only, change=partial(_upcycled, model))
        if model.ctc_head is not None and "ctc_head" in initialised:
            # Drawn weights would begin far above the loss of equal scores, as its frames are large.
            torch.nn.init.zeros_(model.ctc_head.weight)
        if before and before != after:
            log.warning(
                "of init_from, whose outputs are %s, the encoder is read, and of the outputs %s",
                ", ".join(sorted(before)),
                ", ".join(sorted(before & after)) or "none",
            )
    _select_trained(model, config, 0)
    _check_trains(model, config, initialised)


def _select_trained(model: ASRModel, config: TrainConfig, step: int) -> None:
    if config.lora is not None:
        adapt(model, config.lora)
    elif frozen := config.training.frozen_at(step):
        freeze(model, frozen, "training.freeze")


def _check_trains(model: ASRModel, config: TrainConfig, parts: Sequence[str]) -> None:
    frozen = [name for name, x in model.named_parameters() if not x.requires_grad]
    stuck = [p for p in parts if any(n == p or n.startswith(f"{p}.") for n in frozen)]
    if not stuck:
        return
    rule, remedy = "not be in `training.freeze`", "leave it out there"
    if config.lora is not None:
        also = ",".join([*config.lora.also_train, *stuck])
        rule, remedy = "be in `lora.also_train`", f"set lora.also_train=[{also}]"
    raise ValueError(
        f"`model.{stuck[0]}` must {rule}, because it is drawn anew, at least for pieces that "
        f"`init_from` lacks, but it would not be trained: {remedy}."
    )


def source_of_model(config: TrainConfig, saved: Saved | None) -> Path | None:
    if saved is not None:
        return saved.path
    return None if config.init_from is None else checkpoint.resolve(config.init_from)


def joins_language_model(config: TrainConfig, source: Path | None) -> bool:
    """Return whether a run that begins puts a language model behind an encoder."""
    if config.model.language_model is None:
        return False
    return source is None or checkpoint.read_description(source).model.language_model is None


def _join(model: ASRModel, config: TrainConfig, source: Path | None) -> None:
    """Read the encoder of ``source``, if given, and the language model of its folder."""
    # Imported here, because transformers takes seconds.
    from effasr.interop.huggingface.language_model import read_language_model

    settings, language_model = config.model.language_model, model.language_model
    assert settings is not None
    assert language_model is not None
    if source is not None:
        checkpoint.load_weights(model, source, only=("encoder.", "features."))
    if settings.weights == "pretrained":
        read_language_model(settings.path, language_model)
    language_model.check_against_transformers()


def replaces_tokenizer(tokenizer: str, source: Path) -> bool:
    """Return whether ``data.tokenizer`` takes the place of the tokenizer of ``init_from``."""
    # A language model keeps its own.
    return bool(tokenizer) and checkpoint.read_description(source).model.language_model is None


def _load_for_tokenizer(
    model: ASRModel, source: Path, tokenizer: Tokenizer, only: tuple[str, ...]
) -> None:
    """Load a model, and make rows of the tokens that its own tokenizer lacks.

    The rows of pieces that both tokenizers have move to their new places; that of a piece which the
    old tokenizer spells by several is their mean; the others stay as they were initialised. All
    other weights are read, with those of the blank and of durations.
    """
    description = checkpoint.read_description(source)
    decoder = model.config.decoder
    if decoder is not None and (decoder.suppress or decoder.begin_suppress):
        raise ValueError(
            "`data.tokenizer` must be left out where the decoder of `init_from` has tokens that "
            "are never written (model.decoder.suppress), whose numbers are those of its own "
            "tokenizer: set suppress and begin_suppress to [], or leave data.tokenizer out."
        )
    before = checkpoint.read_tokenizer(source)
    moves = shared_pieces(before, tokenizer)
    spelled = spell_pieces(before, tokenizer, moves)
    initial = model.state_dict()
    old_size, new_size = description.vocab_size, tokenizer.vocab_size

    def move_rows(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        tables = {*TOKEN_TABLES, "text_encoder.running_duration"}
        for name in weights.keys() & initial.keys() & tables:
            old, table = weights[name], initial[name].clone()
            # The classes after the pieces, where there are as many.
            if len(old) - old_size == len(table) - new_size and len(old) > old_size:
                table[new_size:] = old[old_size:]
            table[list(moves)] = old[list(moves.values())].to(table.dtype)
            for number, ids in spelled.items():
                table[number] = old[ids].float().mean(0)
            weights[name] = table
        return _upcycled(model, weights)

    checkpoint.load_weights(model, source, only=only, change=move_rows)
    log.warning(
        "the tokenizer of init_from is replaced: the model keeps its weights for %d of the %d "
        "pieces of data.tokenizer, begins with the mean of the pieces that spell it for %d, and "
        "learns the others anew",
        len(moves),
        tokenizer.vocab_size,
        len(spelled),
    )


def _upcycled(model: ASRModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give each expert the weights of the dense network that it replaces; outputs stay equal."""
    for name, network in model.named_modules():
        dense = weights.get(f"{name}.linear1.weight")
        if not isinstance(network, ExpertFeedForward) or dense is None or dense.ndim == 3:
            continue
        # With one expert a row, its output is multiplied by its probability. Logits near 0 make it
        # 1 / count, whichever expert is chosen.
        is_scaled = network.router is not None and network.config.top_k == 1
        for layer, scale in ("linear1", 1), ("linear2", network.config.count if is_scaled else 1):
            for parameter in ("weight", "bias"):
                if (old := weights.get(key := f"{name}.{layer}.{parameter}")) is not None:
                    weights[key] = (scale * old).repeat(network.config.count, *[1] * old.ndim)
        if network.router is not None:
            drawn = network.router.weight.detach()
            weights[f"{name}.router.weight"] = drawn * (_FIRST_LOGITS if is_scaled else 1)
    return weights


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


def spell_pieces(old: Tokenizer, new: Tokenizer, known: Mapping[int, int]) -> dict[int, list[int]]:
    """Return the old ids that spell each new piece, by its id, where the old tokenizer can.

    Of its languages, the one that needs the fewest pieces is taken.
    """
    before, spelled = old.pieces(), {}
    skipped = {*known, *new.specials.values()}
    for number, piece in enumerate(new.pieces()):
        text = piece.replace("▁", " ").strip()
        if number in skipped or not text:
            continue
        ways = []
        for language in old.languages or ("",):
            ids = old.encode(text, language)
            if not piece.startswith("▁") and len(ids) > 1 and before[ids[0]] == "▁":
                ids = ids[1:]  # only a text, and no piece within a word, begins with a space
            if ids and not old.count_unknown(ids):
                ways.append(ids)
        if ways:
            spelled[number] = min(ways, key=len)
    return spelled
