import os
import signal

import pytest

from effasr.data.filters.config import Limits
from effasr.data.index import index_reader
from effasr.data.index.index_reader import build_table
from effasr.data.manifest.prepare import prepare
from tests.support.corpora import read_lines, write_lines

LIMITS = Limits(min_duration=0.6, max_duration=1.0, speed_perturbation=(0.9, 1.0))


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(index_reader, "PART", 3)


@pytest.fixture(params=["nemo", "cuts", "kaldi", "parts of files", "late"])
def source(request, nemo, tmp_path):
    """A manifest with good lines and bad ones."""
    manifest = nemo(14)
    (manifest.parent / "audio/u4.wav").unlink()
    match request.param:
        case "cuts":
            prepare(manifest, tmp_path / "cuts")
            return tmp_path / "cuts"
        case "kaldi":
            rows = read_lines(manifest)
            texts = "".join(f"k{index} {row['text']}\n" for index, row in enumerate(rows))
            audio = "".join(f"k{index} {row['audio_filepath']}\n" for index, row in enumerate(rows))
            (manifest.parent / "text").write_text(texts)
            (manifest.parent / "wav.scp").write_text(audio)
            return manifest.parent
        case "parts of files":
            # Names that must be told apart, from the first lines on.
            rows = [
                row | {"offset": 0.1 * part, "duration": 0.3}
                for row in read_lines(manifest)
                for part in range(2)
            ]
            return write_lines(manifest.parent / "parts.jsonl", rows)
        case "late":
            rows = read_lines(manifest)
            return write_lines(manifest.parent / "late.jsonl", rows + rows[5:9])
    return manifest


def test_the_table_does_not_depend_on_the_processes(source, tokenizer, check_same):
    paths = [source, source]
    limits = Limits(min_duration=0.2, ctc=False, speed_perturbation=(0.9, 1.0))
    alone = build_table(paths, tokenizer, limits, "en", [0, 1])
    counts = []
    together = build_table(paths, tokenizer, limits, "en", [0, 1], jobs=2, progress=counts.append)
    check_same(alone, together)
    assert len(alone) > 20
    assert alone.sources.max() == 1
    assert counts == sorted(counts)
    assert counts[-1] == len(alone) + len(alone.dropped)
    assert "missing_audio" in {drop.reason for drop in alone.dropped} or source.name == "cuts"


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("line", [1, 8])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text": 5}, "`text` must be a string, but is 5"),
        ({"id": "n0"}, "the id 'n0' is taken by an earlier line"),
    ],
)
def test_a_malformed_line_is_told(nemo, tokenizer, jobs, line, change, message):
    manifest = nemo(12)
    rows = [row | {"id": f"n{index}"} for index, row in enumerate(read_lines(manifest))]
    rows[line] |= change
    table = build_table([write_lines(manifest, rows)], tokenizer, LIMITS, "en", [0], jobs=jobs)
    (details,) = {item.details for item in table.dropped if item.reason == "malformed_row"}
    assert f"train.jsonl:{line + 1}: {message}" in details


def test_a_killed_process_is_told(nemo, tokenizer, monkeypatch):
    parent = os.getpid()

    def die(self, *arguments):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    manifest = nemo(12)
    monkeypatch.setattr(index_reader.IndexBuilder, "add", die)
    with pytest.raises(RuntimeError, match="a process that reads it was killed: if memory ran out"):
        build_table([manifest], tokenizer, LIMITS, "en", [0], jobs=2)
