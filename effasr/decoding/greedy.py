"""Decoding of a packed batch by any method, and greedy search of the attention decoder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from effasr.data.batch import Batch
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.config import INSTRUCTION, LENGTH_PENALTY, LM_WEIGHT, DecodingConfig
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.decoding.ctc_beam import ctc_beam
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.decoded import Decoded, with_details
from effasr.decoding.lm.neural import load_neural_lm
from effasr.decoding.lm.ngram import TokenLM, load_ngrams
from effasr.decoding.lm.word_fusion import WordFusion
from effasr.decoding.lm.words import load_word_ngrams
from effasr.decoding.nbest.hypothesis import Hypothesis
from effasr.decoding.nbest.parts import with_parts
from effasr.decoding.tdt_beam import tdt_beam
from effasr.decoding.transducer_beam import transducer_beam
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.asr import ASRModel
from effasr.model.checks import check
from effasr_kernels import PackedSequence

_PARTS = {
    "attention": "decoder",
    "transducer": "transducer",
    "ctc": "CTC head",
    "language_model": "language model",
}
"""The part of a model that each method needs."""


def choose_method(model: ASRModel, method: str) -> str:
    """Resolve ``auto``, and check that the model supports the method.

    Raises:
        ValueError: The model lacks a part that the method needs.
    """
    has = {
        "attention": model.config.decoder is not None,
        "transducer": model.config.transducer is not None,
        "ctc": model.config.ctc,
        "language_model": model.config.language_model is not None,
    }
    if method == "auto":
        method = next((name for name, there in has.items() if there), "")
    if not any(has.values()):
        raise ValueError(
            "the model must have a decoder, a transducer or a CTC head to write text, but was "
            "pretrained on audio alone (best_rq): fine-tune it with init_from."
        )
    if not has[method]:
        part = _PARTS[method]
        raise ValueError(f"`method` must not be {method}, because this model has no {part}.")
    return method


def check_config(model: ASRModel, config: DecodingConfig) -> str:
    """Check that the model supports a configuration; return the method.

    Raises:
        ValueError: The model lacks a part, or an option has no effect with this method.
    """
    method = choose_method(model, config.method)
    for name, what in (
        ("length_penalty", "transcripts of different lengths"),
        ("coverage_penalty", "what transcripts attend to"),
    ):
        compares = method == "attention" or (method, name) == ("language_model", "length_penalty")
        used = getattr(config, name) is None or (compares and config.beam > 1)
        rule = f"be left out for the method {method} with a beam of {config.beam}"
        remedy = f"only a beam of 2 or more of the attention decoder compares {what}"
        check(used, name, rule, getattr(config, name), remedy)
    if config.ctc_weight > 0:
        rule, remedy = f"be 0 for the method {method}", "joint scores need the attention decoder"
        attends = method == "attention"
        check(attends, "ctc_weight", rule, config.ctc_weight, f"{remedy}: use method attention")
        rule = "be 0 for a model without CTC head"
        check(model.config.ctc, "ctc_weight", rule, config.ctc_weight)
    if config.no_repeat_ngram is not None:
        rule, remedy = f"be left out for the method {method}", "only the attention decoder loops"
        attends = method == "attention"
        check(attends, "no_repeat_ngram", rule, config.no_repeat_ngram, remedy)
    rule = f"be left out for the method {method}"
    if method == "language_model":
        remedy = "lists are those of the attention decoder, CTC and transducers"
        check(config.nbest is None, "nbest", rule, config.nbest, remedy)
        others = "with the attention decoder, CTC and transducers"
        remedy = f"texts have confidences, which `effasr label` needs, {others}"
        check(not config.confidence, "confidence", rule, True, remedy)
        remedy = f"words have confidences {others}"
        check(not config.word_confidence, "word_confidence", rule, True, remedy)
    if config.lm is not None:
        remedy = "only the attention decoder and CTC can be joined with a language model"
        check(method not in ("transducer", "language_model"), "lm", rule, config.lm, remedy)
        rule = f"be at least 2 for CTC with the language model {config.lm}"
        check(method != "ctc" or config.beam > 1, "beam", rule, config.beam)
    check_words(model, config)
    return method


def check_prompt(prompt: Prompt, method: str, config: DecodingConfig) -> None:
    """Check that a method can write what a prompt asks for.

    Raises:
        ValueError: The prompt asks for a translation, which the method or an option excludes.
    """
    if prompt.monotonic:
        return
    if method == "language_model":
        if config.instruction == INSTRUCTION:
            raise ValueError(
                f"`instruction` must ask for the translation from {prompt.source} to "
                f"{prompt.target}, because a language model reads it alone, but is "
                f"{INSTRUCTION!r}: give `--instruction` as in the training data."
            )
        return
    if method != "attention":
        name = {"ctc": "CTC", "transducer": "a transducer"}[method]
        raise ValueError(
            f"`task` must be transcribe for {name}, which follows the speech, but is "
            f"{prompt.task}: use method attention."
        )
    if config.ctc_weight > 0:
        raise ValueError(
            "`ctc_weight` must be 0 for a translation, because CTC follows the speech, but is "
            f"{config.ctc_weight}."
        )
    if config.words:
        raise ValueError(
            "`words` must be false for a translation, whose words have no place in the speech."
        )


def load_lm(config: DecodingConfig, model: ASRModel, tokenizer: Tokenizer) -> TokenLM | None:
    """Read the language model of a configuration, if it has one.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no model over the tokens of this model, or over words.
    """
    if config.lm is None:
        return None
    if config.lm.is_dir():
        rule = "be token for a folder, whose model is over tokens"
        check(config.lm_unit == "token", "lm_unit", rule, config.lm_unit)
        device = next(model.parameters()).device
        return load_neural_lm(config.lm, model.vocab_size, tokenizer.eos_id, device)
    if config.lm_unit == "word":
        return WordFusion(load_word_ngrams(config.lm), tokenizer)
    return load_ngrams(config.lm, model.vocab_size, tokenizer.eos_id)


def check_words(model: ASRModel, config: DecodingConfig) -> None:
    """Check that the model can compute word timestamps, if they are requested.

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
    lm: TokenLM | None = None,
) -> list[Decoded]:
    """Encode and decode a batch; the model is in evaluation mode, on the batch's device.

    The result of an utterance does not depend on the others in the batch.

    Args:
        model: The model.
        tokenizer: Tokenizer of the model.
        batch: Batch whose ``tokens`` and ``text`` are unused.
        prompts: Tokens that the attention decoder reads first, for each utterance of the batch;
            those of a language model are in the batch, one of conversations.
        config: The default configuration by default.
        lm: The result of `load_lm` for the configuration, to read it once for many batches; read
            here by default.

    Returns:
        One result for each of ``batch.ids``.

    Raises:
        ValueError: The number of prompts is wrong, a prompt is empty or leaves no room for a
            transcript, or the model does not support the configuration.
    """
    config = DecodingConfig() if config is None else config
    count = len(batch.ids)
    if len(prompts) != count:
        raise ValueError(f"`prompts` must be {count}, one per utterance, but are {len(prompts)}.")
    method = check_config(model, config)
    if not count:
        return []
    lm = load_lm(config, model, tokenizer) if lm is None else lm
    if method == "language_model":
        return _answers(model, tokenizer, batch, config)
    encoded = model.encode(batch)
    if method != "attention":
        decoded = _aligned(model, method, encoded, config, lm)[:count]
    else:
        limits = [
            limit_of(model, prompt, config.max_tokens(frames))
            for prompt, frames in zip(prompts, batch.frames.lengths, strict=False)
        ]
        decoded = _attention(model, tokenizer, encoded, prompts, limits, config, lm)
    eos_id = tokenizer.eos_id
    decoded = with_details(model, method, encoded, prompts, decoded, config, eos_id)
    if not config.score_parts:
        return decoded
    return with_parts(model, method, encoded, prompts, decoded, config, lm, eos_id)


def _answers(
    model: ASRModel, tokenizer: Tokenizer, batch: Batch, config: DecodingConfig
) -> list[Decoded]:
    """Decode conversations by the language model."""
    # Imported here, because transformers takes seconds.
    from effasr.data.conversation.batch import ConversationBatch
    from effasr.data.tokenizer import ChatTokenizer
    from effasr.decoding.language_model.search import answer_limits, answers

    if not isinstance(batch, ConversationBatch) or not isinstance(tokenizer, ChatTokenizer):
        raise ValueError(
            "`batch` and `tokenizer` must be of conversations for a language model, but are a "
            f"{type(batch).__name__} and a {type(tokenizer).__name__}."
        )
    return answers(
        model,
        batch,
        answer_limits(model, batch, config.max_tokens),
        tokenizer.stop_ids,
        classes=tokenizer.vocab_size,
        beam=config.beam,
        length_penalty=(LENGTH_PENALTY if config.length_penalty is None else config.length_penalty),
    )


def is_plain_greedy(config: DecodingConfig) -> bool:
    """Return whether the attention decoder alone takes the best token of each step."""
    alone = config.ctc_weight == 0 and config.lm is None
    return config.beam == 1 and alone and config.no_repeat_ngram is None


def _aligned(
    model: ASRModel,
    method: str,
    encoded: PackedSequence,
    config: DecodingConfig,
    lm: TokenLM | None,
) -> list[Decoded]:
    """Decode each sequence by CTC or the transducer."""
    if config.beam == 1:
        return [
            Decoded(tuple(tokens)) for tokens in _likeliest_path(model, method, encoded, config)
        ]
    nbest = config.nbest or 1
    if method == "ctc":
        lists = ctc_beam(model, encoded, config.beam, lm, _lm_weight(config), nbest)
    else:
        assert model.transducer is not None  # checked by choose_method
        limits = [config.max_tokens(frames) for frames in encoded.layout.lengths]
        search = transducer_beam if model.transducer.config.durations is None else tdt_beam
        lists = search(model.transducer, encoded, config.beam, limits, nbest)
    return [_listed(found, with_alternatives=config.nbest is not None) for found in lists]


def _likeliest_path(
    model: ASRModel, method: str, encoded: PackedSequence, config: DecodingConfig
) -> list[list[int]]:
    """Decode each sequence by greedy search of CTC or the transducer."""
    if method == "ctc":
        return ctc_greedy(model, encoded, blank_id=model.vocab_size)
    assert model.transducer is not None  # checked by choose_method
    return transducer_greedy(model.transducer, encoded, config.max_symbols)


def _listed(found: Sequence[Hypothesis], *, with_alternatives: bool) -> Decoded:
    """Return the best hypothesis, and all of them if they are requested."""
    # A duration may lead past the end on every path.
    tokens = found[0].tokens if found else ()
    return Decoded(tokens, alternatives=tuple(found) if with_alternatives else ())


def _attention(
    model: ASRModel,
    tokenizer: Tokenizer,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    config: DecodingConfig,
    lm: TokenLM | None,
) -> list[Decoded]:
    """Decode each sequence by the attention decoder."""
    what = model, encoded, prompts, limits, tokenizer.eos_id, tokenizer.vocab_size
    if is_plain_greedy(config) and lm is None:
        return attention_greedy(*what)
    return attention_beam(
        *what,
        beam=config.beam,
        length_penalty=(LENGTH_PENALTY if config.length_penalty is None else config.length_penalty),
        coverage_penalty=config.coverage_penalty or 0.0,
        ctc_weight=config.ctc_weight,
        no_repeat_ngram=config.no_repeat_ngram,
        lm=lm,
        lm_weight=_lm_weight(config),
        nbest=config.nbest,
    )


def _lm_weight(config: DecodingConfig) -> float:
    return LM_WEIGHT if config.lm_weight is None else config.lm_weight


def attention_greedy(
    model: ASRModel,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    eos_id: int,
    classes: int | None = None,
    *,
    slots: int | None = None,
) -> list[Decoded]:
    """Decode sequences of encoder output by the attention decoder and its caches.

    Args:
        model: Model with a decoder.
        encoded: (T, C), from ``model.encode``; sequences past ``len(prompts)`` are not decoded.
        prompts: At least one token each; they may differ in length.
        limits: Most tokens of each transcript after its prompt, at least one.
        eos_id: The end token.
        classes: Number of the model's classes that are tokens; all by default.
        slots: Sequences decoded at a time; all by default.

    Returns:
        One result for each prompt.
    """
    every = [
        Utterance(name, prompt, limit)
        for name, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    if not every:
        return []
    slots = len(every) if slots is None else slots
    engine = Engine(
        model, eos_id, classes, slots=slots, max_frames=encoded.layout.max_seqlen_bound, graph=False
    )
    engine.submit(encoded, every)
    found = dict(engine.results())
    return [found[name] for name in range(len(every))]


def limit_of(model: ASRModel, prompt: Sequence[int], wanted: int) -> int:
    """Return the number of tokens that may follow the prompt, within the decoder's positions.

    Raises:
        ValueError: The prompt is empty or leaves no room for a transcript.
    """
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
