"""A model as ONNX graphs: the encoder, and the decoder's step with its caches."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from effasr.model.asr import ASRModel
from effasr.model.padded import PaddedDecoderStep, PaddedEncoder

DESCRIPTION = "onnx.json"

_log = logging.getLogger(__name__)
_OPSET = 18
_LARGEST_BYTES = 1_500_000_000
"""Of weights inside a graph, whose file may have 2 GB; larger ones lie beside it."""
_STEP_INPUTS = (
    *(
        "tokens",
        "positions",
        "past_keys",
        "past_values",
        "cross_keys",
        "cross_values",
        "encoded_lengths",
    ),
)
_STEP_OUTPUTS = ("logits", "keys", "values")
_CHECKED_STEPS = 5
_TOLERANCE = 1e-3
"""Largest difference of a checked output, relative to its largest value."""


def export_onnx(model: ASRModel, directory: Path, texts: Mapping[str, Any]) -> list[str]:
    """Write ``encoder.onnx``, ``decoder_step.onnx`` if there is a decoder, and a description.

    The encoder has the CTC head's log-probabilities as an output, if the model has one. A
    transducer is left out with a warning.

    Args:
        model: In any mode, on any device; exported in float32.
        directory: Made if need be; files of the same names are replaced.
        texts: What the description says of tokens, such as the prompt and the end.

    Returns:
        Names of the graphs.

    Raises:
        ValueError: The packages for it are missing, the model has neither decoder nor CTC head, or
            positions that this format does not know.
    """
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"`format` onnx needs the package {package}, which is not installed: "
                "pip install 'effasr[onnx]'."
            )
    if model.decoder is None and model.ctc_head is None:
        raise ValueError(
            "`format` onnx must be given a model with a decoder or a CTC head, but this one has "
            "a transducer alone: use format huggingface."
        )
    if model.transducer is not None:
        _log.warning("The transducer is not exported: the ONNX graphs have none.")
    model = _on_host(model)
    encoder = PaddedEncoder(model).eval()
    features, lengths = _example_features(model)
    with torch.no_grad():
        encoded = encoder(features, lengths)
    batch, time = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC
    graphs = ["encoder.onnx"]
    _write(
        encoder,
        directory / graphs[0],
        {"features": features, "lengths": lengths},
        encoder.outputs,
        {"features": {0: batch, 1: time}, "lengths": {0: batch}},
    )
    if model.decoder is not None:
        graphs.append("decoder_step.onnx")
        named = dict(zip(encoder.outputs, encoded, strict=True))
        past = torch.zeros_like(named["cross_keys"][:, :, :, :2])
        tokens = torch.zeros(len(lengths), dtype=torch.int64)
        inputs = (
            tokens,
            tokens + 2,
            past,
            past.clone(),  # the exporter joins inputs that are one tensor
            named["cross_keys"],
            named["cross_values"],
            encoded[1],
        )
        _write(
            PaddedDecoderStep(model).eval(),
            directory / graphs[1],
            dict(zip(_STEP_INPUTS, inputs, strict=True)),
            _STEP_OUTPUTS,
            {
                name: {0: batch} if value.ndim == 1 else {1: batch, 3: time}
                for name, value in zip(_STEP_INPUTS, inputs, strict=True)
            },
        )
    _describe(model, directory, encoder.outputs, texts)
    return graphs


def check_onnx(model: ASRModel, directory: Path) -> None:
    """See that onnxruntime computes from the graphs what the model computes.

    Raises:
        ImportError: onnxruntime is not installed.
        ValueError: An output differs.
    """
    import onnxruntime

    def session(name: str) -> Any:
        return onnxruntime.InferenceSession(directory / name, providers=["CPUExecutionProvider"])

    model = _on_host(model)
    encoder = PaddedEncoder(model).eval()
    features, lengths = _example_features(model, seed=1)
    with torch.no_grad():
        expected = encoder(features, lengths)
    inputs = {"features": features.numpy(), "lengths": lengths.numpy()}
    found = session("encoder.onnx").run(None, inputs)
    named = dict(zip(encoder.outputs, found, strict=True))
    for name, value, other in zip(encoder.outputs, expected, found, strict=True):
        _compare(f"encoder.onnx: {name}", value, other)
    if model.decoder is None:
        return
    step, graph = PaddedDecoderStep(model).eval(), session("decoder_step.onnx")
    constant = [named[name] for name in ("cross_keys", "cross_values", "encoded_lengths")]
    tokens = np.zeros(len(lengths), np.int64)
    past = named["cross_keys"][:, :, :, :0], named["cross_keys"][:, :, :, :0]
    for place in range(min(_CHECKED_STEPS, model.decoder.config.max_positions)):
        values = tokens, np.full_like(tokens, place), *past, *constant
        with torch.no_grad():
            expected = step(*(torch.from_numpy(value) for value in values))
        logits, *past = graph.run(None, dict(zip(_STEP_INPUTS, values, strict=True)))
        for name, value, other in zip(_STEP_OUTPUTS, expected, (logits, *past), strict=True):
            _compare(f"decoder_step.onnx: {name}", value, other)
        tokens = logits.argmax(-1)


def _on_host(model: ASRModel) -> ASRModel:
    state = {name: value.detach().cpu().float() if value.is_floating_point() else value.cpu()
             for name, value in model.state_dict().items()}  # fmt: skip
    return ASRModel.from_state_dict(model.config, model.vocab_size, state).eval()


def _example_features(model: ASRModel, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of three utterances of different lengths."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([83, 40, 9])
    bins = model.config.features.mel_bins
    return torch.randn(3, int(lengths.max()), bins, generator=draw), lengths


def _write(
    module: nn.Module,
    path: Path,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[str],
    dynamic: Mapping[str, Mapping[int, Any]],
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    with tempfile.TemporaryDirectory(prefix=".onnx-", dir=path.parent) as folder:
        target = Path(folder) / path.name
        with warnings.catch_warnings(), _quiet():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                module,
                (),
                target,
                kwargs=dict(inputs),
                input_names=list(inputs),
                output_names=list(outputs),
                dynamic_shapes=dict(dynamic),
                opset_version=_OPSET,
                external_data=size > _LARGEST_BYTES,
                dynamo=True,
                verbose=False,
            )
        # The graph last: without it the rest is not looked at.
        for file in sorted(Path(folder).iterdir(), key=lambda file: file == target):
            os.replace(file, path.parent / file.name)


class _quiet:
    """The exporter tells what it does, and which functions it registers, as warnings."""

    def __enter__(self) -> None:
        self._logger = logging.getLogger("torch.onnx")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._level)


def _describe(
    model: ASRModel, directory: Path, outputs: Sequence[str], texts: Mapping[str, Any]
) -> None:
    decoder = model.config.decoder
    rows: dict[str, Any] = {
        "features": asdict(model.config.features),
        "vocabulary": model.vocab_size,
        "encoder": {
            "file": "encoder.onnx",
            "inputs": {
                "features": "float32 (batch, time, mel_bins): log-mel rows, normalised",
                "lengths": "int64 (batch,): real rows of each utterance, at least 1",
            },
            "outputs": {name: _OUTPUTS[name] for name in outputs},
        },
        **texts,
    }
    if model.ctc_head is not None:
        rows["blank_id"] = model.vocab_size
    if decoder is not None:
        rows["max_positions"] = decoder.max_positions
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
            "layers": decoder.layers,
            "heads": decoder.heads,
            "head_dim": decoder.head_width,
        }
    path = directory / DESCRIPTION
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


_OUTPUTS = {
    "encoded": "float32 (batch, frames, width): frames is time / 8, rounded up",
    "encoded_lengths": "int64 (batch,): real frames of each utterance",
    "cross_keys": "float32 (layers, batch, heads, frames, head_dim)",
    "cross_values": "as cross_keys",
    "ctc_log_probs": "float32 (batch, frames, vocabulary + 1): the blank is last",
}


def _compare(name: str, expected: Tensor, found: np.ndarray) -> None:
    difference = np.abs(expected.numpy() - found).max(initial=0)
    largest = np.abs(expected.numpy()).max(initial=1e-6)
    if expected.shape != found.shape or not difference <= _TOLERANCE * largest:
        raise ValueError(
            f"{name} must be what the model computes, but differs by {difference:.3g} of "
            f"{largest:.3g}: this version of torch or onnxruntime exports or runs it wrongly."
        )
