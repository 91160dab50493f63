"""The readers of foreign files: a valid input of each, and how it is read.

| reader | what it reads | limits, checked before memory is taken |
| --- | --- | --- |
| nemo | .nemo: tar, YAML, weights, tokenizer | 10,000 files, 64 MiB each and 256 MiB together beside the weights; unpacks to 20 times its size; plain tensors |
| nemo_folder | the same as a folder | as nemo |
| huggingface | config.json, safetensors | JSON 64 MiB, depth 64, no key twice; shards in the folder alone |
| tokenizer_json | tokenizer.json | 64 MiB |
| tokenizer_own, tokenizer_nemo | SentencePiece models and their JSON | 64 MiB each, in the folder alone |
| model_directory | model.yaml, safetensors, tokenizer | YAML 4 MiB, depth 64, 500,000 values after aliases |
| checkpoint | a run's checkpoints | checksums; uncompressed; plain tensors |
| recipe | YAML | as model_directory |
| manifest, text_pairs | JSON lines | 32 MiB a line, depth 64; gzip to 300 times its size |
| cuts | lhotse cuts, gzipped | as manifest; no programs, no URLs |
| shar | cuts and tars of audio | as cuts; regular files of the tar |
| kaldi | wav.scp, text, segments | as manifest; no programs |
| csv_folder | metadata.csv | as manifest; a field 128 KiB |
| clips | recordings to augment with | as cuts |
| wav, flac, ogg | libsndfile | 8,192 samples a byte, 1 kHz to 1 MHz; regular files; decoded in blocks |
| arpa | n-grams, gzipped | as manifest; counts are those promised |
| evaluation | wer.json, hypotheses.jsonl | as manifest |
| bucket_table | JSON | as huggingface |
| kineto | traces of torch.profiler, gzipped | 200 times its size and 16 MiB; regular files |
| nsys | SQLite exports of nsys | values of 16 MiB; read-only, no functions of the file's schema |
"""  # noqa: E501

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

RATE = 16_000
ARPA = """\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.3
-0.6\t0\t-0.25
-0.7\t1\t-0.1

\\2-grams:
-0.2\t<s> 0
-0.3\t0 1

\\end\\
"""
PROFILING = Path(__file__).parents[2] / "profiling"
NEMO = Path(__file__).parents[1] / "interop" / "nemo"


@dataclass(frozen=True)
class Reader:
    """Writes a valid input into a folder, and reads the input in a folder."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]


def _sound(path: Path, seconds: float = 0.2) -> None:
    draw = np.random.default_rng(0)
    soundfile.write(path, draw.uniform(-0.5, 0.5, int(seconds * RATE)).astype(np.float32), RATE)


def _rows(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@lru_cache
def _model() -> Any:
    from effasr.data.features.log_mel import FeatureConfig
    from effasr.model.asr import ASRModel, ModelConfig
    from effasr.model.encoder import FastConformerConfig

    encoder = FastConformerConfig(
        width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4
    )
    return ASRModel(
        ModelConfig(features=FeatureConfig(mel_bins=16), encoder=encoder, decoder=None, ctc=True),
        21,
    )


@lru_cache
def _tokenizer(folder: str) -> Any:
    from effasr.data.tokenizer import train_tokenizer

    text = ["the quick brown fox jumps over the lazy dog", "a large fawn jumped quickly"] * 20
    return train_tokenizer({"en": text}, folder, vocab_size=40)


def _own_tokenizer(folder: Path) -> None:
    _tokenizer(str(folder.with_name("own"))).save(folder)


def _nemo_tokenizer(folder: Path) -> None:
    from effasr.data.tokenizer import NeMoTokenizer

    models = _tokenizer(str(folder.with_name("own"))).models
    NeMoTokenizer({"en": models["en"], "de": models["en"]}).save(folder)


def _tokenizer_json(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"the": 0, "fox": 1, "<unk>": 2, "<pad>": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def _use_tokenizer(folder: Path) -> object:
    from effasr.data.tokenizer import load_tokenizer

    found = load_tokenizer(folder)
    language = found.languages[0] if found.languages else "en"
    return found.decode(found.encode("the quick fox", language)[:50])


def _huggingface(folder: Path) -> None:
    from effasr.interop.huggingface.checkpoint import export_model

    export_model(_model(), folder)


def _use_huggingface(folder: Path) -> object:
    from effasr.interop.huggingface.checkpoint import import_model
    from effasr.model.asr import ASRModel

    return ASRModel.from_state_dict(*import_model(folder))


def _model_directory(folder: Path) -> None:
    from effasr.checkpoint import save_model
    from effasr.model.asr import ASRModel

    tokenizer = _tokenizer(str(folder.with_name("own")))
    save_model(folder, ASRModel(_model().config, tokenizer.vocab_size), tokenizer)


def _use_model_directory(folder: Path) -> object:
    from effasr.checkpoint import load_model

    return load_model(folder)


def _checkpoint(folder: Path) -> None:
    import torch

    from effasr.training.checkpointing.run_checkpoints import RunCheckpoints

    tokenizer = _tokenizer(str(folder.with_name("own")))
    from effasr.model.asr import ASRModel

    model = ASRModel(_model().config, tokenizer.vocab_size)
    state = {"step": 1, "moment": torch.arange(3.0), "config": {"betas": [0.9, 0.98]}}
    RunCheckpoints(folder, keep=1).save(1, model, tokenizer, state)


def _use_checkpoint(folder: Path) -> object:
    from effasr.checkpoint import load_model
    from effasr.training.checkpointing.run_checkpoints import RunCheckpoints

    newest = RunCheckpoints(folder, keep=1).newest()
    return newest and load_model(newest[0])


def _nemo_folder(folder: Path) -> None:
    with tarfile.open(NEMO / "ctc.nemo") as tar:
        tar.extractall(folder, filter="data")


def _import_nemo(path: Path) -> object:
    from effasr.interop.nemo.importer import import_nemo
    from effasr.model.asr import ASRModel

    found = import_nemo(path)
    return ASRModel.from_state_dict(found.config, found.vocab_size, found.state)


def _recipe(folder: Path) -> None:
    from effasr.config import RECIPES

    shutil.copy(RECIPES / "demo.yaml", folder / "recipe.yaml")


def _use_recipe(folder: Path) -> object:
    from effasr.config import load
    from effasr.training.config import TrainConfig

    return load(TrainConfig, folder / "recipe.yaml")


def _manifest(folder: Path) -> None:
    _sound(folder / "a.wav")
    row = {"audio_filepath": "a.wav", "text": "the fox", "duration": 0.2, "lang": "en"}
    _rows(folder / "manifest.jsonl", [row | {"id": "1"}, row | {"id": "2", "speaker": "s"}])


def _use_manifest(path: Path) -> object:
    from effasr.data.audio.waveform import load_audio
    from effasr.data.manifest.reader import read, request

    cuts: Any = read(path)
    return [(request(cut), len(load_audio(cut))) for cut in cuts]


def _read_cuts(folder: Path) -> Any:
    from effasr.data.manifest.reader import read

    _manifest(folder)
    found = read(folder / "manifest.jsonl")
    (folder / "manifest.jsonl").unlink()
    return found


def _cuts(folder: Path) -> None:
    _rows(folder / "cuts.jsonl.gz", [cut.to_dict() for cut in list(_read_cuts(folder))])


def _shar(folder: Path) -> None:
    cuts = _read_cuts(folder)
    cuts.to_shar(str(folder), fields={"recording": "flac"}, shard_size=3)
    (folder / "a.wav").unlink()


def _kaldi(folder: Path) -> None:
    _sound(folder / "a.wav")
    (folder / "wav.scp").write_text("r1 a.wav\n")
    (folder / "text").write_text("u1 the fox\nu2 jumps\n")
    (folder / "segments").write_text("u1 r1 0.0 0.1\nu2 r1 0.1 -1\n")
    (folder / "utt2spk").write_text("u1 s\nu2 s\n")


def _csv_folder(folder: Path) -> None:
    _sound(folder / "a.wav")
    (folder / "metadata.csv").write_text('file_name,text,id\na.wav,"the, fox",1\na.wav,dog,2\n')


def _text_pairs(folder: Path) -> None:
    row = {"source_text": "the fox", "text": "der Fuchs", "source_lang": "en", "target_lang": "de"}
    _rows(folder / "pairs.jsonl", [row, row])


def _use_text_pairs(folder: Path) -> object:
    from effasr.data.manifest.pairs import is_text_only, pairs

    return is_text_only(folder / "pairs.jsonl") and list(pairs(folder / "pairs.jsonl"))


def _clips(folder: Path) -> None:
    _rows(folder / "clips.jsonl", [cut.recording.to_dict() for cut in list(_read_cuts(folder))])


def _use_clips(folder: Path) -> object:
    from effasr.data.audio.augmentation.clips import Clips

    clips = Clips.load([folder / "clips.jsonl"], "noise")
    return [len(clips.read(index)) for index in range(len(clips))]


def _arpa(folder: Path) -> None:
    (folder / "lm.arpa.gz").write_bytes(gzip.compress(ARPA.encode()))


def _use_arpa(folder: Path) -> object:
    import torch

    from effasr.decoding.lm.ngram import load_ngrams
    from effasr.decoding.lm.words import load_word_ngrams

    path = folder / "lm.arpa.gz"
    tokens = load_ngrams(path, 4, 3).scores(torch.tensor([[[-1, 0]]]), torch.tensor([[[0, 1]]]))
    return tokens, load_word_ngrams(path).log_probs([("", "0 1"), ("0", "x")])


def _evaluation(folder: Path) -> None:
    summary = {"normalizer": "basic", "rtfx": 3.0, "failed": 0, "wer": 0.5, "words": 2}
    (folder / "wer.json").write_text(json.dumps(summary))
    rows = [{"id": str(n), "reference": "the fox", "hypothesis": "a fox"} for n in range(3)]
    _rows(folder / "hypotheses.jsonl", rows)


def _use_evaluation(folder: Path) -> object:
    from effasr.evaluation.comparison import compare, read_run

    return compare(read_run(folder))


def _buckets(folder: Path) -> None:
    content = {
        "bucket_duration_bins": [[2.0, 10], [4.0, 20]],
        "bucket_batch_size": [8, 4],
    }
    (folder / "buckets.json").write_text(json.dumps(content))


def _use_buckets(folder: Path) -> object:
    from effasr.data.sampling.bucket_table import BucketTable

    return BucketTable.load(folder / "buckets.json")


def _trace(folder: Path) -> None:
    from tests.profiling.kineto_trace import Trace

    trace = Trace()
    for start in (1000, 3000):
        trace.note("ProfilerStep#1", start, start + 1500)
        trace.operator("aten::mm", start, start + 300, sequence=start)
        trace.kernel(start + 100, start + 200, start + 900)
    trace.flow(1, (100, 1000), (177, 3000))
    trace.write(folder / "trace.json")
    trace.write(folder / "trace2.json.gz")


def _nsys(folder: Path) -> None:
    from tests.profiling.nsys_export import Export

    export = Export()
    for start in (1000, 3000):
        export.range("step", start, start + 1500)
        export.kernel(start + 100, start + 200, start + 900)
    export.write(folder / "a.sqlite")


def _use_captures(folder: Path) -> object:
    sys.path[:0] = [str(PROFILING)] if str(PROFILING) not in sys.path else []
    from analysis.readers import sources

    return [len(sources.read(path).work) for path in sorted(folder.iterdir())]


def _audio(suffix: str) -> Reader:
    def read(folder: Path) -> object:
        from effasr.data.audio.waveform import read_audio, read_header

        return read_header(folder / f"a.{suffix}"), read_audio(folder / f"a.{suffix}")

    return Reader(lambda folder: _sound(folder / f"a.{suffix}", 0.05), read)


READERS = {
    "nemo": Reader(
        lambda folder: (folder / "model.nemo").write_bytes((NEMO / "ctc.nemo").read_bytes()),
        lambda folder: _import_nemo(folder / "model.nemo"),
    ),
    "nemo_folder": Reader(_nemo_folder, _import_nemo),
    "huggingface": Reader(_huggingface, _use_huggingface),
    "tokenizer_json": Reader(_tokenizer_json, _use_tokenizer),
    "tokenizer_own": Reader(_own_tokenizer, _use_tokenizer),
    "tokenizer_nemo": Reader(_nemo_tokenizer, _use_tokenizer),
    "model_directory": Reader(_model_directory, _use_model_directory),
    "checkpoint": Reader(_checkpoint, _use_checkpoint),
    "recipe": Reader(_recipe, _use_recipe),
    "manifest": Reader(_manifest, lambda folder: _use_manifest(folder / "manifest.jsonl")),
    "cuts": Reader(_cuts, _use_manifest),
    "shar": Reader(_shar, _use_manifest),
    "kaldi": Reader(_kaldi, _use_manifest),
    "csv_folder": Reader(_csv_folder, _use_manifest),
    "text_pairs": Reader(_text_pairs, _use_text_pairs),
    "clips": Reader(_clips, _use_clips),
    "wav": _audio("wav"),
    "flac": _audio("flac"),
    "ogg": _audio("ogg"),
    "arpa": Reader(_arpa, _use_arpa),
    "evaluation": Reader(_evaluation, _use_evaluation),
    "bucket_table": Reader(_buckets, _use_buckets),
    "kineto": Reader(_trace, _use_captures),
    "nsys": Reader(_nsys, _use_captures),
}
