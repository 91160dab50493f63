"""Times how a system transcribes the files of a manifest, once its model is read; counts errors.

    python profiling/transcribers.py SYSTEM MODEL MANIFEST --output FILE.json [--window S]
        [--precision KIND] [--batch N] [--times] [--joined SECONDS] [--threads N]

SYSTEM is effasr (MODEL is a folder of `effasr import`), faster_whisper, transformers or whisper_cpp
(package pywhispercpp; MODEL is a GGML file, which has its precision). KIND is a compute type of
CTranslate2's, or a dtype. A first file is transcribed before the time is taken.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from effasr.data.audio.audio_file import open_audio
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.wer import count_errors, total

RATE = 16_000
Audio = Sequence[np.ndarray]
Transcriber = Callable[[Audio], Iterator[str]]


def effasr(options: argparse.Namespace) -> Transcriber:
    from effasr.checkpoint import load_model
    from effasr.decoding.config import DecodingConfig
    from effasr.transcription.transcribe import Transcription, Waveform, transcribe

    loaded = load_model(options.model).with_window(options.window)
    budget = options.batch and round(options.batch * options.window / 0.08)
    config = DecodingConfig(
        precision=options.precision, frame_budget=budget, timestamps=options.times
    )

    def run(audio: Audio) -> Iterator[str]:
        waveforms = [Waveform(str(n), x, RATE) for n, x in enumerate(audio)]
        for result in transcribe(loaded.model, loaded.tokenizer, waveforms, config=config):
            assert isinstance(result, Transcription), result
            yield result.text

    return run


def faster_whisper(options: argparse.Namespace) -> Transcriber:
    from faster_whisper import WhisperModel

    model = WhisperModel(
        str(options.model),
        device="cpu",
        compute_type=options.precision,
        cpu_threads=options.threads,
    )

    def run(audio: Audio) -> Iterator[str]:
        for samples in audio:
            parts, _ = model.transcribe(
                samples,
                beam_size=1,
                language="en",
                without_timestamps=not options.times,
            )
            yield "".join(part.text for part in parts)

    return run


def whisper_cpp(options: argparse.Namespace) -> Transcriber:
    from pywhispercpp.model import Model

    model = Model(str(options.model), n_threads=options.threads, print_progress=False)

    def run(audio: Audio) -> Iterator[str]:
        for samples in audio:
            # Without the text before, which would carry one file's words into the next.
            parts = model.transcribe(
                samples, language="en", no_context=True, no_timestamps=not options.times
            )
            yield "".join(part.text for part in parts)

    return run


def transformers(options: argparse.Namespace) -> Transcriber:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    processor = WhisperProcessor.from_pretrained(options.model)
    model = WhisperForConditionalGeneration.from_pretrained(options.model)
    model = model.to(getattr(torch, options.precision)).eval()
    multilingual = model.generation_config.is_multilingual
    asked = {"language": "en", "task": "transcribe"} if multilingual else {}

    def run(audio: Audio) -> Iterator[str]:
        size = options.batch or 1
        for begin in range(0, len(audio), size):
            features = processor(
                list(audio[begin : begin + size]), sampling_rate=RATE, return_tensors="pt"
            ).input_features
            with torch.inference_mode():
                tokens = model.generate(features.to(model.dtype), **asked)
            yield from processor.batch_decode(tokens, skip_special_tokens=True)

    return run


def read(manifest: Path, joined: float) -> tuple[list[np.ndarray], list[str]]:
    """Return the samples and texts of lines, joined to recordings of so many seconds."""
    lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    audio, texts, rng = [], [], np.random.default_rng(0)
    for line in lines:
        with open_audio(manifest.parent / line["audio_filepath"]) as file:
            samples = file.read(file.frames).mean(1)
        if audio and len(audio[-1]) + len(samples) < joined * RATE:
            pause = 1e-4 * rng.standard_normal(round(rng.uniform(0.3, 2.0) * RATE))
            audio[-1] = np.concatenate([audio[-1], pause.astype(np.float32), samples])
            texts[-1] += " " + line["text"]
        else:
            audio.append(samples)
            texts.append(line["text"])
    return audio, texts


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    systems = {make.__name__: make for make in (effasr, faster_whisper, transformers, whisper_cpp)}
    parser.add_argument("system", choices=systems)
    parser.add_argument("model", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--window", type=float, default=30.0)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--batch", type=int, help="files at a time (default: those of the system)")
    parser.add_argument("--times", action="store_true", help="with Whisper's tokens of times")
    parser.add_argument("--joined", type=float, default=0.0, help="files of S seconds, with pauses")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    run = systems[options.system](options)
    audio, texts = read(options.manifest, options.joined)
    list(run(audio[:1]))
    wall, cpu = time.perf_counter(), time.process_time()
    transcripts = list(run(audio))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    normalize = get_normalizer("basic", "en")
    errors = total(
        count_errors(normalize(text), normalize(transcript))
        for text, transcript in zip(texts, transcripts, strict=True)
    )
    seconds = sum(map(len, audio)) / RATE
    figures = {"recordings": len(audio), "audio_s": round(seconds, 1), "wer": errors.wer}
    speed = {"cpu_s": round(cpu, 2), "wall_s": round(wall, 2), "audio_s_per_cpu_s": seconds / cpu}
    content = json.dumps({**figures, **speed, "transcripts": transcripts}, indent=1)
    options.output.write_text(content, encoding="utf-8")
    sys.stdout.write(f"{options.system}: {figures} {speed}\n")


if __name__ == "__main__":
    main()
