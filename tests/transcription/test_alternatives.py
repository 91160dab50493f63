"""Alternatives of segments and recordings, in results, evaluations and on the command line."""

import json
import math
from itertools import product

import numpy as np
import pytest

from effasr.decoding.config import DecodingConfig
from effasr.training.run_dir.run_directory import read_lines
from effasr.transcription.results import Alternative, Transcription, joined
from effasr.transcription.transcribe import Waveform, transcribe
from tests.support.recognition import write_set

RATE = 16_000


def test_alternatives_of_a_recording_are_the_best_combinations() -> None:
    draw = np.random.default_rng(0)
    lists = [
        [
            Alternative(f"{n}{k}", rank, rank)
            for k, rank in enumerate(sorted(-draw.random(size))[::-1])
        ]
        for n, size in enumerate((5, 3, 5, 1))
    ]
    each_item = sorted((sum(item.rank for item in row) for row in product(*lists)), reverse=True)
    result = joined(lists)
    assert [item.rank for item in result] == pytest.approx(each_item[:5])
    assert result[0].text == "00 10 20 30"
    assert len({item.text for item in result}) == 5
    assert joined([]) == joined([lists[0], []]) == ()
    assert (
        joined([[Alternative("a", -1.0, -1.0)], [Alternative("b", -1.0, -1.0)]], "")[0].text == "ab"
    )
    assert Alternative("", -math.inf, -1.0).as_row() == {"text": "", "score": None}


@pytest.mark.parametrize("method", ["attention", "ctc"])
@pytest.mark.parametrize("beam", [1, 3])
def test_long_recordings_have_lists_of_their_own(method, beam, model, tokenizer, noise) -> None:
    waveform = Waveform("long", noise(3.5, seed=2), RATE)
    config = DecodingConfig(
        method=method, beam=beam, nbest=beam, chunk_seconds=1.0, search_seconds=0.2, extra_tokens=3
    )
    (result,) = transcribe(model, tokenizer, [waveform], config=config)
    assert isinstance(result, Transcription)
    assert len(result.segments) > 2
    assert result.alternatives[0].text == result.text
    assert 1 <= len(result.alternatives) <= beam
    for segment in result.segments:
        row = segment.as_row()["alternatives"]
        assert row[0]["text"] == segment.text
        assert all(item["score"] < 0 for item in row)


def test_commands_write_alternatives(effasr, saved, noise, tmp_path) -> None:
    sounds = [noise(0.8 + 0.4 * number, seed=number) for number in range(3)]
    manifest, out = write_set(tmp_path, sounds, ["one two three"] * 3), tmp_path / "out"
    options = ("--run", saved, "--device", "cpu", "--method", "ctc", "--beam", "4")
    segment = effasr("transcribe", *options, tmp_path / "u1.wav", "--nbest", "3", "--json").segment
    assert len(segment["alternatives"]) == 3
    assert segment["alternatives"][0]["text"] == segment["text"]
    command = ("evaluate", *options, "--manifest", manifest, "--output", out)
    assert "of 4 alternatives (oracle)" in effasr(*command, "--nbest", "4").out
    result = json.loads((out / "wer.json").read_text())
    assert result["oracle"]["nbest"] == 4
    assert result["oracle"]["wer"] <= result["wer"]
    for row in read_lines(out / "hypotheses.jsonl"):
        assert row["alternatives"][0]["text"] == row["hypothesis"]
        scores = [item["score"] for item in row["alternatives"]]
        assert scores == sorted(scores, reverse=True)
    assert effasr(*command).code == 0
    assert "oracle" not in json.loads((out / "wer.json").read_text())
