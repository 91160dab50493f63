"""Export of models for sherpa-onnx, in the layout that it reads NeMo's models in.

A CTC head becomes ``model.onnx``; a transducer ``encoder.onnx``, ``decoder.onnx`` (the predictor)
and ``joiner.onnx``; and the tokenizer ``tokens.txt``. sherpa-onnx takes inputs and outputs by their
order, and sizes from the metadata of the first graph. With a context, the first graph encodes the
next chunk of streams, with the inputs and outputs of NeMo's cache-aware encoders.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from effasr.checks import check
from effasr.data.atomic_files import write_atomically
from effasr.interop.onnx.export import on_host, refuse_context
from effasr.interop.onnx.graph import check_packages, write_graph
from effasr.interop.onnx.plain_model import JointStep, PaddedEncoder, StreamingStep, predictor_step
from effasr.interop.tables import refuse_experts
from effasr.model.asr import ASRModel
from effasr.model.streaming_encoder import check_features, check_streamable
from effasr.model.transducer import Transducer
from effasr.nn.predictor import LSTMPredictor
from effasr_kernels import Context

NAMES = ("cache_last_channel", "cache_last_time", "cache_last_channel_len")
"""NeMo's names of the caches; those of the next step end with ``_next``."""


class SherpaStep(nn.Module):
    """Mel rows of a chunk to what the joiner or CTC's search reads.

    sherpa-onnx takes the sizes of the three caches from the metadata; what they hold is known to
    the graph alone: ``cache_last_channel`` the keys and values of earlier frames, (B, layers, left,
    2 width); ``cache_last_time`` the inputs of the convolutions and the mel rows of earlier frames,
    flat, (B, 1, 1, n); ``cache_last_channel_len`` how many frames were before, (B,).
    """

    def __init__(self, model: ASRModel, context: Context, output: str):
        super().__init__()
        self.step, self.output = StreamingStep(model, context), output
        self.rows = context.chunk * model.config.encoder.subsampling

    def begin(self, streams: int) -> dict[str, Tensor]:
        return dict(zip(NAMES, self._packed(self.step.begin(streams)), strict=True))

    def forward(
        self,
        audio_signal: Tensor,
        length: Tensor,
        cache_last_channel: Tensor,
        cache_last_time: Tensor,
        cache_last_channel_len: Tensor,
    ) -> tuple[Tensor, ...]:
        """Log-probabilities (B, c, V + 1) or the joint share (B, J, c), frames, and caches."""
        # audio_signal: float32 (B, mel_bins, rows); length: int64 (B,), the number of rows;
        # cache_last_channel_len: int64, see the class -> (B, c, V + 1), (B, J, c)
        frames = torch.full_like(length, self.step.encoder_step.context.chunk)
        caches = self._unpacked(cache_last_channel, cache_last_time, cache_last_channel_len)
        outputs = self.step(audio_signal.mT, length, frames, **caches)
        named = dict(zip(self.step.outputs, outputs, strict=True))
        result = named[self.output]
        if self.output == "encoder_projected":
            result = result.mT
        after = {name: named[name.replace("cache", "next")] for name in caches}
        return result, frames, *self._packed(after)

    def _packed(self, caches: dict[str, Tensor]) -> tuple[Tensor, ...]:
        both = torch.cat([caches["cache_keys"], caches["cache_values"]], -2)
        flat = [caches["cache_conv"].transpose(0, 1).flatten(1), caches["cache_mel"].flatten(1)]
        return (
            both.transpose(0, 1).flatten(3),
            torch.cat(flat, 1)[:, None, None],
            caches["cache_frames"],
        )

    def _unpacked(self, channel: Tensor, time: Tensor, count: Tensor) -> dict[str, Tensor]:
        core = self.step.encoder_step
        config = core.encoder.config
        keys, values = channel.transpose(0, 1).unflatten(3, (2 * config.heads, -1)).chunk(2, -2)
        rows = core.kept * config.subsampling, self.step.mel_bins
        flat = time[:, 0, 0]
        inputs, mel = flat.split([flat.shape[1] - rows[0] * rows[1], rows[0] * rows[1]], 1)
        sizes = config.layers, config.conv_kernel - 1, 2 * config.width
        return {
            "cache_mel": mel.unflatten(1, rows),
            "cache_keys": keys,
            "cache_values": values,
            "cache_conv": inputs.unflatten(1, sizes).transpose(0, 1),
            "cache_frames": count,
            # sherpa-onnx decodes whole chunks only.
            "cache_missing": torch.zeros_like(count),
        }


BLANK = "<blk>"
_EXAMPLE_ROWS = (83, 40)


class _Encoder(nn.Module):
    """Mel rows (B, mel_bins, T) to log-probabilities (B, T', V + 1); or (B, J, T') and lengths."""

    def __init__(self, model: ASRModel, output: str):
        super().__init__()
        self.padded, self.output = PaddedEncoder(model), output

    def forward(self, audio_signal: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        outputs = dict(zip(self.padded.outputs, self.padded(audio_signal.mT, length), strict=True))
        if self.output == "ctc_log_probs":
            return (outputs[self.output],)
        return outputs[self.output].mT, outputs["encoded_lengths"]


class _Decoder(nn.Module):
    """The predictor, with the two float states of an LSTM whatever its kind.

    Those of a stateless predictor are its labels plus 1, 0 for none, and a number not in use.
    """

    def __init__(self, head: Transducer):
        super().__init__()
        self.step = predictor_step(head)
        self.is_lstm = isinstance(head.predictor, LSTMPredictor)
        config = head.config
        self.sizes = (
            (config.layers, config.width) if self.is_lstm else (1, max(1, config.context - 1))
        )

    def forward(
        self, targets: Tensor, target_length: Tensor, states_1: Tensor, states_2: Tensor
    ) -> tuple[Tensor, ...]:
        """Read the label int32 (B, 1): (B, J, 1), the lengths, and the next states."""
        label = targets[:, 0].long()
        if self.is_lstm:
            predicted, *states = self.step(label, states_1, states_2)
        elif not self.step.states:
            (predicted,), states = self.step(label), [states_1, states_2]
        else:
            predicted, seen = self.step(label, states_1[0].long() - 1)
            states = [(seen + 1).float()[None], states_2]
        return predicted[..., None], target_length, *states


class _Joiner(nn.Module):
    def __init__(self, head: Transducer):
        super().__init__()
        self.step = JointStep(head)

    def forward(self, encoder_outputs: Tensor, decoder_outputs: Tensor) -> Tensor:
        scores = self.step(encoder_outputs[..., 0], decoder_outputs[..., 0])
        return torch.cat(scores, -1)[:, None, None]


def export_sherpa(
    model: ASRModel, directory: Path, pieces: Sequence[str], context: Context | None = None
) -> list[str]:
    """Write ``tokens.txt``, and the graphs of the CTC head and the transducer.

    With a context, they are for sherpa-onnx's OnlineRecognizer, else for its OfflineRecognizer.
    ``pieces`` are the texts of the tokens, with the character U+2581 for a space.
    """
    check_packages()
    refuse_experts(model.config, "sherpa-onnx")
    _check_runnable(model, context)
    if len(pieces) != model.vocab_size or any(not p or p.split() != [p] for p in pieces):
        raise ValueError(
            f"`pieces` must be {model.vocab_size} texts without white space, one for each token, "
            f"but are {len(pieces)} with others among them."
        )
    model, features = on_host(model), model.config.features
    metadata: dict[str, object] = {
        "vocab_size": model.vocab_size,
        "normalize_type": "per_feature" if features.normalize else "",
        "subsampling_factor": features.rows_per_frame,
        "feat_dim": features.mel_bins,
        "version": 1,
        "model_author": "effasr",
    }
    graphs = []
    if model.ctc_head is not None:
        graphs.append("model.onnx")
        sizes = _write_encoder(model, context, directory / graphs[0])
        _add_metadata(directory / graphs[0], metadata | sizes | {"model_type": "EncDecCTCModelBPE"})
    if model.transducer is not None:
        graphs += ["encoder.onnx", "decoder.onnx", "joiner.onnx"]
        sizes = _write_encoder(model, context, directory / "encoder.onnx", model.transducer)
        sizes |= _write_transducer(model.transducer, directory)
        # It knows transducers with durations by this word in the address of the model.
        url = "" if model.transducer.config.durations is None else "tdt"
        fields = {"model_type": "EncDecRNNTBPEModel", "url": url, **sizes}
        _add_metadata(directory / "encoder.onnx", metadata | fields)
    lines = [f"{piece} {number}\n" for number, piece in enumerate([*pieces, BLANK])]
    write_atomically(directory / "tokens.txt", "".join(lines).encode())
    return graphs


def _check_runnable(model: ASRModel, context: Context | None) -> None:
    config, features = model.config.encoder, model.config.features
    check(
        features.kind == "parakeet" and features.sample_rate == 16_000,
        "features.kind",
        "be parakeet at 16 kHz for sherpa-onnx",
        f"{features.kind} at {features.sample_rate} Hz",
    )
    # It computes windows of 25 ms at each 10 ms of its own, with Kaldi's preemphasis.
    fixed = {"hop": 160, "window": 400, "n_fft": 512, "preemphasis": 0.97}
    for name, value in fixed.items():
        actual = getattr(features, name)
        check(actual == value, f"features.{name}", f"be {value} for sherpa-onnx", actual)
    if context is not None:
        check_features(features)
        check_streamable(config, context)
    else:
        refuse_context(config, "sherpa-onnx's graph of whole utterances")
    if model.ctc_head is None and model.transducer is None:
        raise ValueError("`model` must have a CTC head or a transducer for sherpa-onnx.")
    if model.transducer is not None and (durations := model.transducer.config.durations):
        check(
            context is None,
            "transducer.durations",
            "be null for sherpa-onnx's search of streams, which has none",
            durations,
            "export graphs of streams with --format onnx",
        )
        check(
            list(durations) == list(range(len(durations))),
            "transducer.durations",
            "be 0, 1, 2 and so on for sherpa-onnx",
            durations,
        )


def _write_encoder(
    model: ASRModel, context: Context | None, path: Path, head: Transducer | None = None
) -> dict[str, object]:
    """Write the first graph, of CTC or for a transducer; return what it adds to the metadata."""
    name = "ctc_log_probs" if head is None else "encoder_projected"
    if context is not None:
        return _write_step(SherpaStep(model, context, name), path)
    inputs = {
        "audio_signal": torch.randn(
            len(_EXAMPLE_ROWS), model.config.features.mel_bins, max(_EXAMPLE_ROWS)
        ),
        "length": torch.tensor(_EXAMPLE_ROWS),
    }
    dynamic: dict[str, Mapping[int, str]] = {
        "audio_signal": {0: "batch", 2: "time"},
        "length": {0: "batch"},
    }
    outputs = ["logprobs"] if head is None else ["outputs", "encoded_lengths"]
    write_graph(_Encoder(model, name).eval(), path, inputs, outputs, dynamic)
    return {}


def _write_step(step: SherpaStep, path: Path) -> dict[str, object]:
    count = len(_EXAMPLE_ROWS)
    caches = step.begin(count)
    inputs = {
        "audio_signal": torch.randn(count, step.step.mel_bins, step.rows),
        "length": torch.full((count,), step.rows),
        **caches,
    }
    output = "logprobs" if step.output == "ctc_log_probs" else "outputs"
    outputs = [output, "encoded_lengths", *(f"{name}_next" for name in NAMES)]
    write_graph(step.eval(), path, inputs, outputs, {name: {0: "batch"} for name in inputs})
    sizes = {
        f"{name}_dim{axis}": caches[name].shape[axis] for name in NAMES[:2] for axis in (1, 2, 3)
    }
    return {"window_size": step.rows, "chunk_shift": step.rows, **sizes}


def _write_transducer(head: Transducer, directory: Path) -> dict[str, object]:
    decoder, count = _Decoder(head).eval(), 3
    layers, width = decoder.sizes
    inputs = {
        "targets": torch.full((count, 1), head.blank_id, dtype=torch.int32),
        "target_length": torch.ones(count, dtype=torch.int32),
        "states_1": torch.zeros(layers, count, width),
        "states_2": torch.zeros(layers, count, width),
    }
    names = ["outputs", "prednet_lengths", "next_states_1", "next_states_2"]
    axes = {name: {1 if name.startswith("states") else 0: "batch"} for name in inputs}
    write_graph(decoder, directory / "decoder.onnx", inputs, names, axes)
    frames = torch.zeros(count, head.config.joint, 1)
    both = {"encoder_outputs": frames, "decoder_outputs": frames.clone()}
    axes = {name: {0: "batch"} for name in both}
    write_graph(_Joiner(head).eval(), directory / "joiner.onnx", both, ["outputs"], axes)
    return {"pred_rnn_layers": layers, "pred_hidden": width}


def _add_metadata(path: Path, metadata: Mapping[str, object]) -> None:
    import onnx

    graph: Any = onnx.load(path, load_external_data=False)
    onnx.helper.set_model_props(graph, {name: str(value) for name, value in metadata.items()})
    write_atomically(path, graph.SerializeToString())
