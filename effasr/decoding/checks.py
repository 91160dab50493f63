"""Checks that a model supports a decoding configuration or a prompt."""

from collections.abc import Sequence

import torch

from effasr.checks import check
from effasr.data.prompt import Prompt
from effasr.decoding.config import INSTRUCTION, DecodingConfig
from effasr.model.asr import ASRModel
from effasr.nn.attention import SelfAttention, refusal, try_backend
from effasr_kernels import BackendUnavailable

# The part of a model that each method needs.
_PARTS = {
    "attention": "decoder",
    "transducer": "transducer",
    "ctc": "CTC head",
    "language_model": "language model",
}


def choose_method(model: ASRModel, method: str) -> str:
    """Resolve ``auto``, and check that the model supports the method."""
    has = {
        "attention": model.config.decoder is not None,
        "transducer": model.config.transducer is not None,
        "ctc": model.config.ctc,
        "language_model": model.config.language_model is not None,
    }
    if method == "auto":
        method = next((name for name, exists in has.items() if exists), "")
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
    """Return the method, if the model supports the configuration and every option has an effect."""
    method = choose_method(model, config.method)
    attends, answers = method == "attention", method == "language_model"
    for name, compared in (
        ("length_penalty", "transcripts of different lengths"),
        ("coverage_penalty", "what transcripts attend to"),
    ):
        compares = attends or (answers and name == "length_penalty")
        used = getattr(config, name) is None or (compares and config.beam > 1)
        rule = f"be left out for the method {method} with a beam of {config.beam}"
        remedy = f"only a beam of 2 or more of the attention decoder compares {compared}"
        check(used, name, rule, getattr(config, name), remedy)
    if config.ctc_weight > 0:
        rule = f"be 0 for the method {method}"
        remedy = "joint scores need the attention decoder: use method attention"
        check(attends, "ctc_weight", rule, config.ctc_weight, remedy)
        rule = "be 0 for a model without CTC head"
        check(model.config.ctc, "ctc_weight", rule, config.ctc_weight)
    rule = f"be left out for the method {method}"
    if config.no_repeat_ngram is not None:
        remedy = "only the attention decoder loops"
        check(attends, "no_repeat_ngram", rule, config.no_repeat_ngram, remedy)
    for name, value, unset in (
        ("timestamps", config.timestamps, False),
        ("long_form", config.long_form, "chunked"),
        ("temperature", config.temperature, 0.0),
    ):
        check(attends or value == unset, name, rule, value, "only the attention decoder has it")
    if answers:
        heads = "the attention decoder, CTC and transducers"
        check(config.nbest is None, "nbest", rule, config.nbest, f"lists are those of {heads}")
        remedy = f"texts have confidences, which `effasr label` needs, with {heads}"
        check(not config.confidence, "confidence", rule, True, remedy)
        remedy = f"words have confidences with {heads}"
        check(not config.word_confidence, "word_confidence", rule, True, remedy)
        check(not config.words, "words", rule, True, f"words have times with {heads}")
    if config.lm is not None:
        remedy = "only the attention decoder and CTC can be joined with a language model"
        check(method not in ("transducer", "language_model"), "lm", rule, config.lm, remedy)
        rule = f"be at least 2 for CTC with the language model {config.lm}"
        check(method != "ctc" or config.beam > 1, "beam", rule, config.beam)
    remedy = "only heads that read speech can be joined with phrases: name them in `instruction`"
    rule = "be left out for the method language_model"
    check(not answers or config.boost is None, "boost", rule, config.boost, remedy)
    return method


def choose_attention(model: ASRModel, config: DecodingConfig) -> None:
    """Give the encoder's attention its backend in inference, if that serves the model."""
    requested = None if config.attention == "auto" else config.attention
    layers = [x for x in model.encoder.modules() if isinstance(x, SelfAttention)]
    for layer in layers:
        layer.inference_backend = requested
    if requested is None:
        return
    weight = next(model.parameters())
    dtype = torch.bfloat16 if config.precision == "bfloat16" else weight.dtype
    context = next(iter(getattr(model.encoder.config, "context", ())), None)
    try:
        # Layers are alike.
        try_backend(layers[0], context, weight.device, dtype, requested, trained=False)
    except BackendUnavailable as error:
        refused = f"{requested} ({refusal(error, requested)})"
        rule, remedy = "be a backend that serves the encoder", "leave it out, or take auto"
        check(False, "attention", rule, refused, remedy)


def check_prompt(prompt: Prompt, method: str, config: DecodingConfig) -> None:
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
    rule = "be 0 for a translation, because CTC follows the speech"
    check(config.ctc_weight <= 0, "ctc_weight", rule, config.ctc_weight)
    if config.words:
        raise ValueError(
            "`words` must be false for a translation, whose words have no place in the speech."
        )


def limit_of(model: ASRModel, prompt: Sequence[int], requested: int) -> int:
    assert model.config.decoder is not None  # checked by choose_method
    if not prompt:
        raise ValueError("`prompts` must not be empty: the decoder starts from a token.")
    positions = model.config.decoder.max_positions
    if len(prompt) >= positions:
        raise ValueError(
            f"`prompts` must be shorter than the decoder's {positions} positions, "
            f"but one has {len(prompt)} tokens."
        )
    return min(requested, positions - len(prompt))
