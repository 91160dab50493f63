"""What NeMo itself computes of the tiny random models of this folder, NAME.nemo, in NAME.npz.

Needs NeMo, which neither effasr nor its tests do: in an environment of its own,

    pip install "nemo_toolkit[asr]==3.0.0"
    python tests/interop/nemo/make.py NAME.nemo...

restores models and writes NAME.npz beside each; with ``--draw``, of weights that are drawn anew. A
new case begins with a small model that NeMo has saved. On the way back, after

    effasr import tests/interop/nemo/hybrid.nemo OUT; effasr export --format nemo OUT out.nemo

``make.py --compare hybrid.npz out.nemo`` says how far the file that effasr wrote is from NeMo's.
"""

import argparse
import gzip
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nemo.collections.asr.models import ASRModel  # pyright: ignore[reportMissingImports]

LENGTHS = (4037, 12345, 8000)
TEXTS = {"en": "a dog ran to the red barn", "de": "der rote hund lief zum haus"}
LABELS = 4


def audio() -> list[np.ndarray]:
    """Utterances of different lengths, none a multiple of much: float32 waveforms."""
    generator = np.random.RandomState(0)
    return [(0.1 * generator.randn(samples)).astype(np.float32) for samples in LENGTHS]


@torch.no_grad()
def randomize(model: Any) -> None:
    """No bias is zero and no norm at rest; blanks are likelier than labels."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 0.5 if name.startswith(("decoder.", "joint.", "transf_decoder.")) else 0.2
        parameter.add_(scale * torch.randn_like(parameter))
        if name == "decoder.prediction.embed.weight":
            parameter[-1] = 0.0  # As it stays in NeMo: the blank fills batches, and starts a text.
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(0.0, 0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    if hasattr(model, "joint"):
        _balance(model)


def _balance(model: Any) -> None:
    """Make symbols about equally likely, blanks likelier, and a TDT go on."""
    joint = model.joint
    blank = joint.num_classes_with_blank - 1 - joint.num_extra_outputs
    model.joint.log_softmax = False
    encoded, frames = _encode(model)
    labels = torch.randint(blank, (len(frames), LABELS))
    predicted, _, _ = model.decoder(targets=labels, target_length=torch.full((3,), LABELS))
    scores = joint.joint(encoded.transpose(1, 2), predicted.transpose(1, 2)).flatten(0, 2)
    bias = joint.joint_net[-1].bias
    bias -= scores.mean(0)
    bias[blank] += scores.std(0).mean()
    bias[blank + 1 : blank + 2] -= 2 * scores.std(0).mean()


def _encode(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames of all utterances in one padded batch, (N, C, T), and how many each has."""
    mel, lengths = _mel(model)
    return model.encoder(audio_signal=mel, length=lengths)


def _mel(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    waves = [torch.from_numpy(wave) for wave in audio()]
    lengths = torch.tensor([len(wave) for wave in waves])
    padded = torch.nn.utils.rnn.pad_sequence(waves, batch_first=True)
    return model.preprocessor(input_signal=padded, length=lengths)


@torch.no_grad()
def compute(model: Any) -> dict[str, np.ndarray]:
    """What the model makes of the utterances, all in one padded batch."""
    results: dict[str, Any] = {}
    mel, mel_lengths = _mel(model)
    encoded, frames = _encode(model)
    for number in range(len(frames)):
        results[f"mel_{number}"] = mel[number, :, : mel_lengths[number]].T
        results[f"encoded_{number}"] = encoded[number, :, : frames[number]].T
    if hasattr(model, "transf_decoder"):
        results |= _decoder(model, encoded, frames)
    elif hasattr(model, "joint"):
        results |= _joint(model, encoded, frames)
    head = getattr(model, "ctc_decoder", None) or getattr(model, "decoder", None)
    if hasattr(head, "decoder_layers"):
        scores = head(encoder_output=encoded)
        results |= {f"ctc_{n}": scores[n, : frames[n]] for n in range(len(frames))}
    if model.encoder.att_context_style == "chunked_limited":
        results |= _streams(model, mel, mel_lengths)
    results |= _texts(model)
    return {name: np.asarray(value) for name, value in results.items()}


def _streams(model: Any, mel: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
    """Frames in each context: of whole utterances, and of streams, one at a time."""
    from nemo.collections.asr.parts.utils.streaming_utils import (  # pyright: ignore[reportMissingImports]
        CacheAwareStreamingAudioBuffer,
    )

    encoder, results = model.encoder, {}
    first = encoder.att_context_size
    for context in list(encoder.att_context_size_all):
        encoder.set_default_att_context_size(context)
        name = "x".join(map(str, context))
        encoded, frames = encoder(audio_signal=mel, length=lengths)
        for number, count in enumerate(frames):
            results[f"masked_{name}_{number}"] = encoded[number, :, :count].T
            buffer = CacheAwareStreamingAudioBuffer(model=model, pad_and_drop_preencoded=False)
            # The rows of the utterance only: of audio, it also takes a row that NeMo masks.
            buffer.append_processed_signal(mel[number : number + 1, :, : lengths[number]])
            cache, result = encoder.get_initial_cache_state(batch_size=1), []
            for step, (chunk, rows) in enumerate(buffer):
                part, _, *cache = encoder.cache_aware_stream_step(
                    processed_signal=chunk,
                    processed_signal_length=rows,
                    cache_last_channel=cache[0],
                    cache_last_time=cache[1],
                    cache_last_channel_len=cache[2],
                    keep_all_outputs=buffer.is_buffer_empty(),
                    drop_extra_pre_encoded=step and encoder.streaming_cfg.drop_extra_pre_encoded,
                )
                result.append(part[0].T)
            results[f"streamed_{name}_{number}"] = torch.cat(result)
    encoder.set_default_att_context_size(first)
    return results


def _decoder(model: Any, encoded: torch.Tensor, frames: torch.Tensor) -> dict[str, Any]:
    """Log-probabilities of every token after a prompt and random tokens."""
    states = model.encoder_decoder_proj(encoded.permute(0, 2, 1))
    mask = (torch.arange(states.shape[1]) < frames[:, None]).float()
    prompt = prompts(model)["en-de-pnc"]
    generator = torch.Generator().manual_seed(1)
    most = model.tokenizer.vocab_size
    tokens = torch.randint(most, (len(frames), LABELS), generator=generator)
    tokens = torch.cat([torch.tensor(prompt).expand(len(frames), -1), tokens], 1)
    hidden = model.transf_decoder(
        input_ids=tokens,
        decoder_mask=torch.ones_like(tokens),
        encoder_embeddings=states,
        encoder_mask=mask,
    )
    scores = model.log_softmax(hidden_states=hidden)
    results: dict[str, Any] = {"tokens": tokens}
    return results | {f"logits_{n}": scores[n] for n in range(len(frames))}


def _joint(model: Any, encoded: torch.Tensor, frames: torch.Tensor) -> dict[str, Any]:
    """Scores of every label at every frame, after each of some labels, and greedy search."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(model.tokenizer.vocab_size, (len(frames), LABELS), generator=generator)
    predicted, _, _ = model.decoder(
        targets=labels, target_length=torch.full((len(frames),), LABELS)
    )
    model.joint.log_softmax = False
    scores = model.joint.joint(encoded.transpose(1, 2), predicted.transpose(1, 2))
    result = model.decoding.rnnt_decoder_predictions_tensor(
        encoder_output=encoded, encoded_lengths=frames, return_hypotheses=True
    )
    results: dict[str, Any] = {"labels": labels}
    for n in range(len(frames)):
        results[f"joint_{n}"] = scores[n, : frames[n]]
        results[f"greedy_{n}"] = np.asarray(result[n].y_sequence, np.int64)
        results[f"text_{n}"] = result[n].text
    return results


def prompts(model: Any) -> dict[str, list[int]]:
    """Token ids of prompts, by NeMo's own formatter."""
    result = {}
    for source, target in (("en", "en"), ("en", "de"), ("fr", "en")):
        for pnc in ("pnc", "nopnc"):
            slots = {"source_lang": source, "target_lang": target, "pnc": f"<|{pnc}|>"}
            if model.prompt_format == "canary":
                slots["task"] = "transcribe" if source == target else "translate"
            else:
                slots |= {"decodercontext": "", "emotion": "<|emo:undefined|>"}
                slots |= {"itn": "<|noitn|>", "timestamp": "<|notimestamp|>"}
                slots |= {"diarize": "<|nodiarize|>"}
            turns = [{"role": "user", "slots": {**slots, "prompt_language": "spl_tokens"}}]
            ids = model.prompt.encode_dialog(turns)["context_ids"]
            result[f"{source}-{target}-{pnc}"] = ids.tolist()
    return result


def _texts(model: Any) -> dict[str, Any]:
    tokens, results = model.tokenizer, {}
    for language, text in TEXTS.items():
        arguments = (language,) if hasattr(tokens, "langs") else ()
        ids = tokens.text_to_ids(text, *arguments)
        results[f"ids_{language}"] = ids
        results[f"back_{language}"] = tokens.ids_to_text(ids)
    if hasattr(model, "prompt"):
        results |= {f"prompt_{name}": ids for name, ids in prompts(model).items()}
        results |= {"eos": tokens.eos_id, "pad": tokens.pad_id}
    results["vocabulary"] = tokens.vocab_size
    return results


def save(model: Any, path: Path) -> None:
    """Write a model, gzipped if it was: older versions of NeMo did so, and it is smaller."""
    is_packed = path.read_bytes().startswith(b"\x1f\x8b")
    model.save_to(str(path))
    if is_packed:
        path.write_bytes(gzip.compress(path.read_bytes(), 9, mtime=0))


def compare(result: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> str:
    assert result.keys() == expected.keys(), result.keys() ^ expected.keys()
    errors = {}
    for name, value in expected.items():
        if value.dtype.kind == "f":
            errors[name] = float(np.abs(result[name] - value).max())
        else:
            assert np.array_equal(result[name], value), name
    worst = max(errors, key=lambda name: errors[name])
    return f"{worst} differs by {errors[worst]:.2g} at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="NAME.nemo")
    parser.add_argument("--draw", action="store_true", help="draw the weights anew, and save them")
    parser.add_argument("--compare", type=Path, metavar="NAME.npz", help="compare, write nothing")
    options = parser.parse_args()
    for path in options.files:
        model = ASRModel.restore_from(str(path), map_location="cpu").eval()
        if options.draw:
            randomize(model)
            save(model, path)
        result = compute(model)
        if options.compare:
            line = compare(result, dict(np.load(options.compare)))
            sys.stdout.write(f"{path}: {type(model).__name__}, {line}\n")
        else:
            np.savez_compressed(path.with_suffix(".npz"), **result)


if __name__ == "__main__":
    main()
