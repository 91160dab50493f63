"""Description of exported ONNX graphs for other runtimes: ``onnx.json``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from effasr.data.atomic_files import write_atomically
from effasr.interop.onnx.plain_model import StreamingStep, predictor_step
from effasr.model.asr import ASRModel
from effasr.model.transducer import Transducer

DESCRIPTION = "onnx.json"


def describe(
    model: ASRModel,
    directory: Path,
    outputs: Sequence[str],
    texts: Mapping[str, Any],
    step: StreamingStep | None = None,
) -> None:
    """Write ``onnx.json``; ``texts`` are further fields, such as the prompt and the end token."""
    features = model.config.features
    rows: dict[str, Any] = {
        "features": {**asdict(features), "definition": _FEATURES[features.kind]},
        "subsampling_factor": features.rows_per_frame,
        "vocabulary": model.vocab_size,
        **({"encoder": _encoder(outputs)} if step is None else {"encoder_step": _step(step)}),
        **texts,
    }
    if model.ctc_head is not None or model.transducer is not None:
        rows["blank_id"] = model.vocab_size
    if model.config.decoder is not None and step is None:
        rows["max_positions"] = model.config.decoder.max_positions
        rows["decoder_step"] = {
            "file": "decoder_step.onnx",
            "inputs": {
                "tokens": "int64 (batch,): the next token of each utterance",
                "positions": "int64 (batch,): past, how many tokens it has read",
                "past_keys": "float32 (layers, batch, heads, past, head_dim): past is 0 at first",
                "past_values": "as past_keys",
                "cross_keys": "from the encoder",
                "cross_values": "from the encoder",
                "encoded_lengths": "from the encoder",
            },
            "outputs": {
                "logits": "float32 (batch, vocabulary)",
                "keys": "past_keys of the next step",
                "values": "past_values of the next step",
            },
            "layers": model.config.decoder.layers,
            "heads": model.config.decoder.heads,
            "head_dim": model.config.decoder.head_width,
        }
        # Tokens that must not be chosen, or not first: see DecoderConfig.
        for name in ("suppress", "begin_suppress"):
            if tokens := getattr(model.config.decoder, name):
                rows[name] = list(tokens)
    if model.transducer is not None:
        durations = model.transducer.config.durations
        rows["durations"] = None if durations is None else list(durations)
        rows["predictor"] = _predictor(model.transducer)
        rows["joint"] = _joint(model.transducer)
    text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    write_atomically(directory / DESCRIPTION, text.encode())


def _encoder(outputs: Sequence[str]) -> dict[str, Any]:
    return {
        "file": "encoder.onnx",
        "inputs": {
            "features": "float32 (batch, time, mel_bins): rows as `features` defines them",
            "lengths": "int64 (batch,): real rows of each utterance, at least 1",
        },
        "outputs": {name: _OUTPUTS[name] for name in outputs},
    }


def _step(step: StreamingStep) -> dict[str, Any]:
    context = step.encoder_step.context
    config = step.encoder_step.encoder.config
    causal = config.causal_subsampling
    caches = {
        name: _state(
            value.dtype,
            [None if axis == step.batch_axis(name) else n for axis, n in enumerate(value.shape)],
            0,
            name.replace("cache", "next"),
        )
        for name, value in step.begin(1).items()
    }
    return {
        "file": "encoder_step.onnx",
        "inputs": {
            "features": f"float32 (batch, {context.chunk * config.subsampling}, mel_bins): the "
            "next rows as `features` defines them, without overlap; window t needs the samples up "
            "to t * hop + window / 2",
            "lengths": "int64 (batch,): real rows: all, fewer only in the last step of a stream",
            "frames": f"int64 (batch,): frames of this step: {context.chunk}, fewer only in the "
            "last one, and 0 for a stream that is to stay as it is",
        },
        "outputs": {
            name: _OUTPUTS[name].replace("frames,", f"{context.chunk},", 1)
            for name in step.outputs
            if name in _OUTPUTS
        },
        "caches": caches,
        "context": {"left": context.left, "right": context.right, "chunk": context.chunk},
        "frames_of_a_stream": _CAUSAL_FRAMES if causal else _FRAMES,
    }


def _state(
    dtype: torch.dtype, sizes: Sequence[int | None], initial: int, following: str
) -> dict[str, Any]:
    """A tensor that a step hands to the next one; a size of None is the batch."""
    shape = ["batch" if size is None else size for size in sizes]
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "shape": shape, "initial": initial, "next": following}


def _predictor(head: Transducer) -> dict[str, Any]:
    config, states = head.config, predictor_step(head).states
    inputs = {"tokens": "int64 (batch,): blank_id at first, then each label; never another blank"}
    outputs = {"predictor_projected": "float32 (batch, joint): for the joint network"}
    carried = {}
    for number, state in enumerate(states, 1):
        name, following = f"input_states_{number}", f"output_states_{number}"
        carried[name] = _state(state.dtype, state.shape, state.initial, following)
        shape = ", ".join(map(str, carried[name]["shape"]))
        inputs[name] = f"{carried[name]['dtype']} ({shape}): {state.description}"
        outputs[following] = f"{name} of the next label"
    rows = {
        "file": "predictor.onnx",
        "type": config.predictor,
        "inputs": inputs,
        "outputs": outputs,
        "states": carried,
    }
    if config.predictor == "lstm":
        return rows | {"pred_rnn_layers": config.layers, "pred_hidden": config.width}
    return rows | {"context_size": config.context}


def _joint(head: Transducer) -> dict[str, Any]:
    outputs = {"logits": "float32 (batch, vocabulary + 1): the blank is last"}
    if head.config.durations is not None:
        outputs["duration_logits"] = "float32 (batch, number of durations)"
    return {
        "file": "joint.onnx",
        "inputs": {
            "encoder_projected": "float32 (batch, joint): from the encoder, one frame of each",
            "predictor_projected": "from the predictor",
        },
        "outputs": outputs,
        "width": head.config.joint,
        "greedy_search": _RNNT if head.config.durations is None else _TDT,
    }


_PARAKEET = (
    "x[n] - preemphasis * x[n-1], with x[0] as it is; samples // hop rows, row t a symmetric Hann "
    "window with its middle at sample t * hop and zeros beyond the ends, transformed over n_fft; "
    "power spectrum; Slaney's mel bands of unit area from 0 Hz to sample_rate / 2, as "
    "librosa.filters.mel; log(y + 2**-24); if normalize, per utterance and band (z - mean) / "
    "(std + 1e-5), with the standard deviation over rows - 1"
)
_WHISPER = (
    "zeros behind the samples up to minimum_s seconds and to whole frames of subsampling * hop "
    "samples; a row for each hop, row t a periodic Hann window of n_fft with its middle at sample "
    "t * hop; the signal is reflected before its beginning, and behind its end if minimum_s > 0, "
    "else followed by zeros; power spectrum; Slaney's mel bands of unit area from 0 Hz to "
    "sample_rate / 2, as librosa.filters.mel; z = log10(max(y, 1e-10)); z = max(z, the maximum of "
    "the utterance - 8); (z + 4) / 4"
)
_FEATURES = {"parakeet": _PARAKEET, "whisper": _WHISPER}
_FRAMES = "rows / subsampling_factor, rounded up"
_CAUSAL_FRAMES = (
    "none without rows; else begin with the rows, and as often as subsampling_factor halves to 1: "
    "half of it, rounded down, and 1; a step may so have a frame but no rows"
)
_RNNT = (
    "From frame 0, take the largest of logits. If it is the blank, go on by one frame. Otherwise "
    "it is a label: the predictor reads it and the frame stays, unless it is the max_symbols-th "
    "label of this frame: then go on by one."
)
_TDT = (
    "From frame 0, take the largest of logits, and of durations that of the largest of "
    "duration_logits. If the first is the blank, go on by the duration, at least by one frame. "
    "Otherwise it is a label: the predictor reads it; go on by the duration, which may be 0, but "
    "at least by one frame if it is the max_symbols-th label of this frame."
)
_OUTPUTS = {
    "encoded": "float32 (batch, frames, width): a frame for each subsampling_factor rows",
    "encoded_lengths": "int64 (batch,): real frames of each utterance",
    "cross_keys": "float32 (layers, batch, heads, frames, head_dim)",
    "cross_values": "as cross_keys",
    "ctc_log_probs": "float32 (batch, frames, vocabulary + 1): the blank is last",
    "encoder_projected": "float32 (batch, frames, joint): for the joint network",
}
