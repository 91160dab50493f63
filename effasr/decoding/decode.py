"""Decoding of a packed batch by any method."""

from collections.abc import Sequence

import torch
from torch import Tensor

from effasr.data.batch import Batch
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.attention_beam import attention_beam
from effasr.decoding.checks import check_config, limit_of
from effasr.decoding.config import DecodingConfig
from effasr.decoding.continuous_batching.engine import attention_greedy
from effasr.decoding.ctc_alignment import Span, pack_like
from effasr.decoding.ctc_beam import ctc_beam
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.decoding.decoded import Decoded, EncodedBatch, with_details, with_parts
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.loading import load_boost, load_lm
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.timestamps import timestamp_rules, with_parts_of_time, without_context
from effasr.decoding.transducer_beam import tdt_beam, transducer_beam
from effasr.decoding.transducer_greedy import emitted_labels
from effasr.model.asr import ASRModel
from effasr_kernels import PackedSequence


@torch.no_grad()
def decode(
    model: ASRModel,
    tokenizer: Tokenizer,
    batch: Batch,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig | None = None,
    lm: TokenLM | None = None,
    boost: BoostTree | None = None,
) -> list[Decoded]:
    """Encode and decode a batch; the model is in evaluation mode, on the batch's device.

    The result of an utterance does not depend on the others in the batch, unless it is drawn with
    a ``temperature``. ``prompts`` are what the
    attention decoder reads first; those of a language model are in the batch, one of conversations.
    ``lm`` and ``boost`` are the results of `load_lm` and `load_boost`, to read them once for many
    batches; read here by default.
    """
    config = DecodingConfig() if config is None else config
    count, eos_id = len(batch.ids), tokenizer.eos_id
    if len(prompts) != count:
        raise ValueError(f"`prompts` must be {count}, one per utterance, but are {len(prompts)}.")
    method = check_config(model, config)
    if not count:
        return []
    lm = load_lm(config, model, tokenizer) if lm is None else lm
    boost = load_boost(config, model, tokenizer) if boost is None else boost
    if method == "language_model":
        return _answers(model, tokenizer, batch, config)
    encoded = model.encode(batch)
    if method == "attention":
        limits = [
            limit_of(model, prompt, config.max_tokens(frames))
            for prompt, frames in zip(prompts, batch.frames.lengths, strict=False)
        ]
        decoded = _attention(model, tokenizer, encoded, prompts, limits, config, lm, boost)
        if config.has_times:
            stamps = timestamp_rules(model, tokenizer).tokens
            decoded = [with_parts_of_time(result, stamps) for result in decoded]
            prompts = [without_context(prompt, stamps) for prompt in prompts]
    else:
        decoded = _aligned(model, method, encoded, config, lm, boost)[:count]
    scored = EncodedBatch(model, method, encoded, prompts, eos_id)
    decoded = with_details(scored, decoded, config)
    return (
        with_parts(scored, decoded, config.effective_lm_weight, lm)
        if config.score_parts
        else decoded
    )


@torch.no_grad()
def next_token_scores(model: ASRModel, batch: Batch, start: int, tokens: Sequence[int]) -> Tensor:
    """Return the log-probabilities of tokens after one, float32 (utterances, tokens)."""
    encoded = model.encode(batch)
    count = len(batch.ids)
    hidden, _ = model.decode(pack_like([[start]] * count, encoded), encoded)
    return model.logits(hidden)[:count].float().log_softmax(-1)[:, list(tokens)]


def _answers(
    model: ASRModel, tokenizer: Tokenizer, batch: Batch, config: DecodingConfig
) -> list[Decoded]:
    # Imported here, because transformers takes seconds.
    from effasr.data.conversation.batch import ConversationBatch
    from effasr.data.tokenizer import ChatTokenizer
    from effasr.decoding.language_model.engine import answer_limits, answers

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
        length_penalty=config.effective_length_penalty,
    )


def _aligned(
    model: ASRModel,
    method: str,
    encoded: PackedSequence,
    config: DecodingConfig,
    lm: TokenLM | None,
    boost: BoostTree | None,
) -> list[Decoded]:
    head = model.transducer
    if config.beam == 1 and method == "ctc":
        texts = ctc_greedy(model, encoded, model.vocab_size, boost)
        return [Decoded(tuple(tokens)) for tokens in texts]
    if config.beam == 1:
        assert head is not None  # checked by choose_method
        emitted = emitted_labels(head, encoded, config.max_symbols, boost)
        return [
            Decoded(
                tuple(token for token, _ in labels),
                spans=_emissions([frame for _, frame in labels]) if config.wants_words else None,
            )
            for labels in emitted
        ]
    nbest = config.nbest or 1
    if method == "ctc":
        weight = config.effective_lm_weight
        lists = ctc_beam(model, encoded, config.beam, lm, weight, nbest, boost=boost)
    else:
        assert head is not None  # checked by choose_method
        limits = [config.max_tokens(frames) for frames in encoded.layout.lengths]
        search = transducer_beam if head.config.durations is None else tdt_beam
        lists = search(
            head, encoded, config.beam, limits, nbest, with_frames=config.wants_words, boost=boost
        )
    has_frames = method == "transducer" and config.wants_words
    return [
        Decoded(
            # A duration may lead past the end on every path.
            hypotheses[0].tokens if hypotheses else (),
            spans=_emissions(hypotheses[0].frames if hypotheses else ()) if has_frames else None,
            alternatives=() if config.nbest is None else tuple(hypotheses),
        )
        for hypotheses in lists
    ]


def _emissions(frames: Sequence[int]) -> tuple[Span, ...]:
    """Return the spans of labels of a transducer, which emits each at a single frame."""
    return tuple((frame, frame + 1) for frame in frames)


def _attention(
    model: ASRModel,
    tokenizer: Tokenizer,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    config: DecodingConfig,
    lm: TokenLM | None,
    boost: BoostTree | None,
) -> list[Decoded]:
    eos_id, classes = tokenizer.eos_id, tokenizer.vocab_size
    if config.is_plain_greedy and lm is None and boost is None:
        return attention_greedy(model, encoded, prompts, limits, eos_id, classes)
    rules = None
    if config.has_times:
        rules = timestamp_rules(model, tokenizer)
        classes = model.vocab_size if rules.tokens.marker is None else classes
        prompts = [rules.tokens.prompt(prompt) for prompt in prompts]
    return attention_beam(
        model,
        encoded,
        prompts,
        limits,
        eos_id,
        classes,
        beam=config.beam,
        length_penalty=config.effective_length_penalty,
        coverage_penalty=config.coverage_penalty or 0.0,
        ctc_weight=config.ctc_weight,
        no_repeat_ngram=config.no_repeat_ngram,
        lm=lm,
        lm_weight=config.effective_lm_weight,
        boost=boost,
        nbest=config.nbest,
        timestamps=rules,
        temperature=config.temperature,
        seed=config.seed,
    )
