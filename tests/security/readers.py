"""The readers of data and of results: a valid input of each, and how it is read.

| reader | what it reads | limits, checked before memory is taken |
| --- | --- | --- |
| manifest, text_pairs | JSON lines | 32 MiB a line, depth 64; gzip to 300 times its size |
| cuts | lhotse cuts, gzipped | as manifest; no programs, no URLs |
| shar | cuts and tars of audio | as cuts; regular files of the tar |
| kaldi | wav.scp, text, segments | as manifest; no programs |
| csv_folder | metadata.csv | as manifest; a field 128 KiB |
| json_folder, librispeech, neighbours | metadata.jsonl, *.trans.txt, NAME.txt | as manifest |
| plan_list, plan_table | lists and tables of `effasr plan` | as manifest |
| clips | recordings to augment with | as cuts |
| wav, flac, ogg, mp3, aiff, au, caf, w64 | libsndfile | 8,192 samples a byte, 1 kHz to 1 MHz; regular files; decoded in blocks |
| m4a, mka, wma | ffmpeg, where it is installed | as wav; files alone, no playlists, 4 GiB |
| arpa | n-grams, gzipped | as manifest; counts are those promised |
| evaluation | wer.json, hypotheses.jsonl | as manifest |
| bucket_table | JSON | as huggingface |
| kineto | traces of torch.profiler, gzipped | 200 times its size and 16 MiB; regular files |
| nsys | SQLite exports of nsys | values of 16 MiB; read-only, no functions of the file's schema |
| labels | labels.json, journal.jsonl of `effasr label` | as manifest |

`model_readers` and `foreign_models` have those of models, and `conversation_readers` those of speech language models.
"""  # noqa: E501

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import soundfile

from tests.security.conversation_readers import CONVERSATION_READERS
from tests.security.foreign_models import FOREIGN_MODELS
from tests.security.model_readers import MODEL_READERS
from tests.security.reader import LINE_SLACK, Reader, write_rows
from tests.support.real_ffmpeg import real_ffmpeg

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
AUDIO = ("wav", "flac", "ogg", "mp3", "aiff", "au", "caf", "w64")
FFMPEG_AUDIO = ("m4a", "mka", "wma")
PROFILING = Path(__file__).parents[2] / "profiling"


def _sound(path: Path, seconds: float = 0.2) -> None:
    draw = np.random.default_rng(0)
    soundfile.write(path, draw.uniform(-0.5, 0.5, int(seconds * RATE)).astype(np.float32), RATE)


def _labels(folder: Path) -> None:
    segment = {
        "id": "a", "audio_filepath": "a.wav", "offset": 0.0, "duration": 1.0, "text": "the fox",
        "source_lang": "en", "target_lang": "en", "pnc": True, "confidence": 0.5, "pseudo": True,
        "truncated": False,
    }  # fmt: skip
    (folder / "labels.json").write_text('{"method": "ctc"}')
    rows = [{"id": "a", "segments": [segment]}, {"id": "b", "audio": "b", "problem": "damaged"}]
    write_rows(folder / "journal.jsonl", rows)


def _use_labels(folder: Path) -> object:
    from effasr.transcription.label import LabelFolder

    return LabelFolder(folder, {"method": "ctc"}).finish(0.4)


def _manifest(folder: Path) -> None:
    _sound(folder / "a.wav")
    row = {"audio_filepath": "a.wav", "text": "the fox", "duration": 0.2, "lang": "en"}
    write_rows(folder / "manifest.jsonl", [row | {"id": "1"}, row | {"id": "2", "speaker": "s"}])


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
    write_rows(folder / "cuts.jsonl.gz", [cut.to_dict() for cut in list(_read_cuts(folder))])


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


def _json_folder(folder: Path) -> None:
    _sound(folder / "a.wav")
    row = {"file_name": "a.wav", "text": "the fox", "duration": 0.2}
    write_rows(folder / "metadata.jsonl", [row, row | {"id": "2"}])


def _librispeech(folder: Path) -> None:
    (folder / "1").mkdir()
    _sound(folder / "1" / "1-0.flac")
    (folder / "1" / "1.trans.txt").write_text("1-0 THE FOX\n")


def _neighbours(folder: Path) -> None:
    _sound(folder / "a.wav")
    (folder / "a.txt").write_text("the fox\n")


def _plan_list(folder: Path) -> None:
    rows = [{"duration": 2.5, "num_tokens": 9}, {"duration": 1.0, "text": "the fox", "id": "1"}]
    write_rows(folder / "list.jsonl", rows)


def _plan_table(folder: Path) -> None:
    (folder / "table.tsv").write_text("id\tduration_seconds\tn_tokens\na\t2.5\t9\nb\t1\t\n")
    (folder / "seconds.txt").write_text("# of a corpus\n2.5\n1.0\n")


def _use_plan(folder: Path) -> object:
    from effasr.data.filters.limits import Limits
    from effasr.planning.listing import read_listing

    return len(read_listing(sorted(folder.iterdir()), limits=Limits()))


def _text_pairs(folder: Path) -> None:
    row = {"source_text": "the fox", "text": "der Fuchs", "source_lang": "en", "target_lang": "de"}
    write_rows(folder / "pairs.jsonl", [row, row])


def _use_text_pairs(folder: Path) -> object:
    from effasr.data.manifest.pairs import is_text_only, pairs

    return is_text_only(folder / "pairs.jsonl") and list(pairs(folder / "pairs.jsonl"))


def _clips(folder: Path) -> None:
    write_rows(
        folder / "clips.jsonl", [cut.recording.to_dict() for cut in list(_read_cuts(folder))]
    )


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
    write_rows(folder / "hypotheses.jsonl", rows)


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
    from analysis import sources

    return [len(sources.read(path).work) for path in sorted(folder.iterdir())]


def _audio(suffix: str) -> Reader:
    def read(folder: Path) -> object:
        from effasr.data.audio.waveform import read_audio, read_header

        return read_header(folder / f"a.{suffix}"), read_audio(folder / f"a.{suffix}")

    return Reader(lambda folder: _sound(folder / f"a.{suffix}", 0.05), read)


def _ffmpeg_audio(suffix: str, program: str) -> Reader:
    def make(folder: Path) -> None:
        path = folder.parent / "bin"
        path.mkdir()
        (path / "ffmpeg").symlink_to(program)
        _sound(path / "a.wav", 0.5)
        quiet = (program, "-nostdin", "-v", "error")
        command = [*quiet, "-i", path / "a.wav", folder / f"a.{suffix}"]
        subprocess.run(command, check=True, capture_output=True)

    def read(folder: Path) -> object:
        from effasr.transcription.inputs.audio_stream import open_stream

        with mock.patch.dict(os.environ, PATH=str(folder.parent / "bin")):
            return sum(map(len, open_stream(folder / f"a.{suffix}", RATE).blocks))

    return Reader(make, read)


_FFMPEG = real_ffmpeg()

READERS = {
    **MODEL_READERS,
    **FOREIGN_MODELS,
    "manifest": Reader(
        _manifest, lambda folder: _use_manifest(folder / "manifest.jsonl"), LINE_SLACK
    ),
    "cuts": Reader(_cuts, _use_manifest, LINE_SLACK),
    "shar": Reader(_shar, _use_manifest, LINE_SLACK),
    "kaldi": Reader(_kaldi, _use_manifest, LINE_SLACK),
    "csv_folder": Reader(_csv_folder, _use_manifest, LINE_SLACK),
    "json_folder": Reader(_json_folder, _use_manifest, LINE_SLACK),
    "librispeech": Reader(_librispeech, _use_manifest, LINE_SLACK),
    "neighbours": Reader(_neighbours, _use_manifest, LINE_SLACK),
    "plan_list": Reader(_plan_list, _use_plan, LINE_SLACK),
    "plan_table": Reader(_plan_table, _use_plan, LINE_SLACK),
    "text_pairs": Reader(_text_pairs, _use_text_pairs, LINE_SLACK),
    "clips": Reader(_clips, _use_clips, LINE_SLACK),
    **{suffix: _audio(suffix) for suffix in AUDIO},
    **{suffix: _ffmpeg_audio(suffix, _FFMPEG) for suffix in FFMPEG_AUDIO if _FFMPEG},
    "arpa": Reader(_arpa, _use_arpa, LINE_SLACK),
    "evaluation": Reader(_evaluation, _use_evaluation, LINE_SLACK),
    "bucket_table": Reader(_buckets, _use_buckets),
    "kineto": Reader(_trace, _use_captures),
    "nsys": Reader(_nsys, _use_captures),
    "labels": Reader(_labels, _use_labels, writes=True),
    **CONVERSATION_READERS,
}
