"""Export of ONNX graphs: the encoder, and steps of the decoder and the transducer."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from effasr.interop.onnx import infer
from effasr.interop.onnx.description import DESCRIPTION, describe
from effasr.interop.onnx.graph import Graph, check_packages, write_graph
from effasr.interop.onnx.plain_model import (
    CACHES,
    JointStep,
    PaddedDecoderStep,
    PaddedEncoder,
    StreamingStep,
    in_model_layout,
    predictor_step,
)
from effasr.interop.tables import refuse, refuse_experts
from effasr.model.asr import ASRModel
from effasr.model.encoder import FastConformerConfig
from effasr.model.streaming_encoder import check_features
from effasr.model.transducer import Transducer
from effasr.model.wav2vec2_encoder import Wav2Vec2EncoderConfig
from effasr_kernels import Context

_GRAPHS = ("encoder.onnx", "encoder_step.onnx", "decoder_step.onnx", "predictor.onnx", "joint.onnx")
_STEP_INPUTS: tuple[str, ...] = (
    "tokens",
    "positions",
    "past_keys",
    "past_values",
    "cross_keys",
    "cross_values",
    "encoded_lengths",
)
_STEP_OUTPUTS: tuple[str, ...] = ("logits", "keys", "values")
_JOINT_INPUTS: tuple[str, ...] = ("encoder_projected", "predictor_projected")
_CHECKED_STEPS = 5
_EXAMPLE = (83, 40, 9)
"""Mel rows of the traced utterances."""
_OTHER = (57, 100)
"""Mel rows of the checked utterances: other sizes, to find sizes that became constants."""


def export_onnx(
    model: ASRModel, directory: Path, texts: Mapping[str, Any], context: Context | None = None
) -> list[str]:
    """Write the graphs of a model and their description, ``onnx.json``; return their names.

    The graphs are ``encoder.onnx``, with the log-probabilities of a CTC head if there is one;
    ``decoder_step.onnx`` for a decoder; ``predictor.onnx`` and ``joint.onnx`` for a transducer.
    With a context, which the encoder is trained with, ``encoder_step.onnx`` takes the place of the
    first two: a chunk of streams. Other graphs of an earlier export are removed.
    """
    check_packages()
    refuse_experts(model.config, "an ONNX graph of effasr")
    has_rotary = getattr(model.config.decoder, "positions", None) == "rotary"
    refuse("an ONNX graph of effasr", {"decoder.positions=rotary": has_rotary})
    if context is None:
        refuse_context(model.config.encoder, "the ONNX graph of whole utterances")
    else:
        check_features(model.config.features)
        if model.ctc_head is None and model.transducer is None:
            raise ValueError(
                "`model` must have a CTC head or a transducer for an ONNX graph of streams, but "
                "has neither: an attention decoder needs whole utterances."
            )
    model = on_host(model)
    step = None if context is None else StreamingStep(model, context).eval()
    if step is not None:
        graphs, outputs = ["encoder_step.onnx"], step.outputs
        inputs = {**_chunk(step, len(_EXAMPLE)), **step.begin(len(_EXAMPLE))}
        dynamic = {name: {step.batch_axis(name): "batch"} for name in inputs}
        write_graph(step, directory / graphs[0], inputs, outputs, dynamic)
    else:
        encoder, inputs = PaddedEncoder(model).eval(), _features(model, _EXAMPLE)
        graphs, outputs = ["encoder.onnx"], encoder.outputs
        dynamic = {"features": {0: "batch", 1: "time"}, "lengths": {0: "batch"}}
        write_graph(encoder, directory / graphs[0], inputs, outputs, dynamic)
        if model.decoder is not None:
            graphs.append("decoder_step.onnx")
            with torch.no_grad():
                encoded = dict(zip(outputs, encoder(**inputs), strict=True))
            _write_decoder_step(model, directory / graphs[-1], encoded)
    if model.transducer is not None:
        graphs += ["predictor.onnx", "joint.onnx"]
        write_transducer(model.transducer, directory)
    if step is None and (model.decoder is not None or model.ctc_head is not None):
        tables = {name: getattr(model.features, name).numpy() for name in ("window", "filterbank")}
        np.savez(directory / "features.npz", **tables)
        shutil.copyfile(infer.__file__, directory / "infer.py")
    earlier = earlier_graphs(directory)
    describe(model, directory, outputs, texts, step)
    for name in earlier:
        if name.removesuffix(".data") not in graphs:
            (directory / name).unlink(missing_ok=True)
    return graphs


def refuse_context(encoder: object, framework: str) -> None:
    """Check that an encoder reads features, and sees whole utterances."""
    refuse(framework, {"encoder.kind=wav2vec2": isinstance(encoder, Wav2Vec2EncoderConfig)})
    if isinstance(encoder, FastConformerConfig):
        names = ("context", "causal_convolution", "causal_subsampling")
        refuse(framework, {f"encoder.{name}": bool(getattr(encoder, name)) for name in names})


def earlier_graphs(directory: Path) -> list[str]:
    if not (directory / DESCRIPTION).exists():
        return []
    return [file for name in _GRAPHS for file in (name, f"{name}.data")]


def _chunk(step: StreamingStep, count: int) -> dict[str, Tensor]:
    """Random features of a chunk of so many streams, the last of which ends in it."""
    core = step.encoder_step
    config, chunk = core.encoder.config, core.context.chunk
    draw = torch.Generator().manual_seed(count)
    rows = config.subsampling * chunk
    lengths, frames = torch.full((count,), rows), torch.full((count,), chunk)
    lengths[-1] -= 1
    features = torch.randn(count, rows, step.mel_bins, generator=draw)
    return {"features": features, "lengths": lengths, "frames": frames}


def _write_decoder_step(model: ASRModel, path: Path, encoded: Mapping[str, Tensor]) -> None:
    past = torch.zeros_like(encoded["cross_keys"][:, :, :, :2])
    tokens = torch.zeros(len(_EXAMPLE), dtype=torch.int64)
    inputs = {
        "tokens": tokens,
        "positions": tokens + 2,
        "past_keys": past,
        "past_values": past.clone(),  # the exporter joins inputs that are one tensor
        **{name: encoded[name] for name in ("cross_keys", "cross_values", "encoded_lengths")},
    }
    dynamic = {
        name: {0: "batch"}
        if value.ndim == 1
        else {1: "batch", 3: "past" if name.startswith("past") else "frames"}
        for name, value in inputs.items()
    }
    write_graph(PaddedDecoderStep(model).eval(), path, inputs, _STEP_OUTPUTS, dynamic)


def write_transducer(head: Transducer, directory: Path) -> None:
    """Write ``predictor.onnx`` and ``joint.onnx`` of a transducer on the host, in float32."""
    predictor = predictor_step(head).eval()
    count = len(_EXAMPLE)
    inputs = {"tokens": torch.full((count,), head.blank_id)}
    dynamic = {"tokens": {0: "batch"}}
    outputs = ["predictor_projected"]
    for number, state in enumerate(predictor.states, 1):
        inputs[f"input_states_{number}"] = state.begin(count)
        dynamic[f"input_states_{number}"] = {state.batch_axis: "batch"}
        outputs.append(f"output_states_{number}")
    write_graph(predictor, directory / "predictor.onnx", inputs, outputs, dynamic)
    frames = {name: torch.zeros(count, head.config.joint) for name in _JOINT_INPUTS}
    write_graph(
        JointStep(head).eval(),
        directory / "joint.onnx",
        frames,
        _joint_outputs(head),
        {name: {0: "batch"} for name in frames},
    )


def check_onnx(model: ASRModel, directory: Path, context: Context | None = None) -> None:
    """Check that onnxruntime computes the same from the graphs as the model."""
    model = on_host(model)
    if context is not None:
        _check_step(model, directory, context)
        return
    encoder = PaddedEncoder(model).eval()
    inputs = _features(model, _OTHER)
    with torch.no_grad():
        expected = dict(zip(encoder.outputs, encoder(**inputs), strict=True))
        encoded = Graph(directory / "encoder.onnx").compared(inputs, expected)
        if model.decoder is not None:
            _check_decoder_step(model, directory, encoded)
        if model.transducer is not None:
            check_transducer(model.transducer, directory, encoded["encoder_projected"])


@torch.no_grad()
def _check_step(model: ASRModel, directory: Path, context: Context) -> None:
    """Check three steps of two streams, one of which pauses and then ends."""
    step, graph = StreamingStep(model, context).eval(), Graph(directory / "encoder_step.onnx")
    chunk, caches, outputs = _chunk(step, len(_OTHER)), step.begin(len(_OTHER)), dict[str, Tensor]()
    whole = torch.full_like(chunk["lengths"], chunk["features"].shape[1])
    for lengths, last in (whole, context.chunk), (whole, 0), (chunk["lengths"], context.chunk):
        frames = torch.tensor([context.chunk, last])
        inputs = {**chunk, "lengths": lengths, "frames": frames, **caches}
        expected = dict(zip(step.outputs, step(**inputs), strict=True))
        outputs = graph.compared(inputs, expected)
        caches = {name: outputs[name.replace("cache", "next")] for name in CACHES}
    if model.transducer is not None:
        check_transducer(model.transducer, directory, outputs["encoder_projected"])


def _check_decoder_step(model: ASRModel, directory: Path, encoded: Mapping[str, Tensor]) -> None:
    assert model.decoder is not None
    step, graph = PaddedDecoderStep(model).eval(), Graph(directory / "decoder_step.onnx")
    constant = [encoded[name] for name in ("cross_keys", "cross_values", "encoded_lengths")]
    tokens = torch.zeros(len(_OTHER), dtype=torch.int64)
    past = [encoded["cross_keys"][:, :, :, :0]] * 2
    for position in range(min(_CHECKED_STEPS, model.decoder.config.max_positions)):
        values = tokens, torch.full_like(tokens, position), *past, *constant
        expected = dict(zip(_STEP_OUTPUTS, step(*values), strict=True))
        outputs = graph.compared(dict(zip(_STEP_INPUTS, values, strict=True)), expected)
        past = [outputs["keys"], outputs["values"]]
        tokens = outputs["logits"].argmax(-1)


@torch.no_grad()
def check_transducer(head: Transducer, directory: Path, frames: Tensor) -> None:
    """Check ``predictor.onnx`` and ``joint.onnx`` against the transducer, label by label."""
    # frames: (B, T, J), encoder frames for the joint network
    predictor, joint = Graph(directory / "predictor.onnx"), Graph(directory / "joint.onnx")
    count = len(frames)
    tokens = torch.full((count,), head.blank_id)
    states = tuple(state.begin(count) for state in predictor_step(head).states)
    for frame in frames.unbind(1)[:_CHECKED_STEPS]:
        # The model's own step has an empty state if the graph has none.
        before = in_model_layout(states) or head.predictor.begin(count)
        predicted, after = head.step(tokens, before)
        named = {f"input_states_{n}": state for n, state in enumerate(states, 1)}
        expected = {"predictor_projected": predicted}
        for number, state in enumerate(in_model_layout(after)[: len(states)], 1):
            expected[f"output_states_{number}"] = state
        outputs = predictor.compared({"tokens": tokens, **named}, expected)
        states = tuple(outputs[f"output_states_{n}"] for n in range(1, len(states) + 1))
        pair = dict(zip(_JOINT_INPUTS, (frame, outputs["predictor_projected"]), strict=True))
        scores = head.logits(*pair.values()).tensor_split([head.blank_id + 1], -1)
        names = _joint_outputs(head)
        outputs = joint.compared(pair, dict(zip(names, scores[: len(names)], strict=True)))
        tokens = outputs["logits"][:, : head.blank_id].argmax(-1)


def _joint_outputs(head: Transducer) -> list[str]:
    return ["logits"] + ["duration_logits"] * (head.config.durations is not None)


def on_host(model: ASRModel) -> ASRModel:
    """A copy in evaluation mode, on the host, float32."""
    state = {name: value.detach().cpu().float() if value.is_floating_point() else value.cpu()
             for name, value in model.state_dict().items()}  # fmt: skip
    return ASRModel.from_state_dict(model.config, model.vocab_size, state).eval()


def _features(model: ASRModel, lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Random features of utterances of these lengths."""
    draw = torch.Generator().manual_seed(len(lengths))
    bins = model.config.features.mel_bins
    features = torch.randn(len(lengths), max(lengths), bins, generator=draw)
    return {"features": features, "lengths": torch.tensor(lengths)}
