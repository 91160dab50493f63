"""Which models can decode streams frame by frame, and in which contexts."""

from collections.abc import Sequence
from typing import Literal

from effasr.checks import check
from effasr.model.asr import ASRModel
from effasr.model.encoder import FastConformerConfig
from effasr.model.streaming_encoder import check_features, check_streamable
from effasr_kernels import Context


def is_streamable(model: ASRModel) -> bool:
    try:
        check_model(model, "auto", stream_contexts(model)[:1])
    except ValueError:
        return False
    return True


def context_for(model: ASRModel, latency_seconds: float | None) -> Context:
    """Return the trained context with the longest chunk that a latency allows."""
    contexts = stream_contexts(model)
    if not contexts:
        raise ValueError(
            "`model.encoder.context` must be given to decode a stream frame by frame, but the "
            "encoder attends to whole utterances: use a model that is trained with a context."
        )
    if latency_seconds is None:
        return contexts[0]
    frame = model.config.features.framing.seconds
    # A latency of 240 ms allows three frames of 80 ms, however the numbers are rounded.
    short = [context for context in contexts if context.chunk * frame <= latency_seconds + 1e-6]
    if not short:
        least = min(context.chunk for context in contexts) * frame
        raise ValueError(
            f"`latency_seconds` must be at least {least:g} for this model, its shortest chunk, but "
            f"is {latency_seconds:g}."
        )
    return max(short, key=lambda context: (context.chunk, context.left or 0))


def stream_contexts(model: ASRModel) -> list[Context]:
    """The contexts of a model that allow to decode a stream, or if there are none, the others."""
    encoder = model.config.encoder
    contexts = encoder.context if isinstance(encoder, FastConformerConfig) else ()
    streamable = [item for item in contexts if item.left is not None and item.right == 0]
    return streamable or list(contexts)


def check_model(
    model: ASRModel, method: str, contexts: Sequence[Context]
) -> Literal["transducer", "ctc"]:
    """Return the search, after checks that no part of the model waits for later audio."""
    if languages := model.config.language_adapters:
        raise ValueError(
            "`lora.by_language` must be empty to decode a stream, but there are adapters of "
            f"{', '.join(languages)}: merge those of one language by `effasr export MODEL OUT "
            f"--format effasr --merge-language {languages[0]}`."
        )
    check_streamable(model.config.encoder, contexts[0] if contexts else None)
    check_features(model.config.features)
    outputs = {"transducer": model.transducer is not None, "ctc": model.ctc_head is not None}
    if method == "auto":
        for name, has in outputs.items():
            if has:
                return name  # type: ignore[return-value]
        raise ValueError(
            "`method` must be transducer or ctc to decode a stream, but the model has neither a "
            "transducer nor a CTC head."
        )
    check(method in outputs, "method", "be auto, transducer or ctc for a stream", repr(method))
    check(outputs[method], "method", "be an output of the model", repr(method))
    return "ctc" if method == "ctc" else "transducer"
