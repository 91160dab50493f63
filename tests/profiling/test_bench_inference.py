import csv
from pathlib import Path

import bench_inference
import numpy as np
import pytest
import torch
from bench import streams

from effasr.transcription.online import OnlineRecognizer

CPU = torch.device("cpu")
TINY = bench_inference.SIZES["tiny"]


def test_rows_of_every_shape(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    options = ["--size", "tiny", "--shapes", "3/1", "1/3", "--batch", "3", "--repeats", "2"]
    assert bench_inference.main([*options, "--output", str(out)]) == 0
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["shape"] for row in rows] == ["3/1", "1/3"]
    for row in rows:
        parts = [float(row[name]) for name in ("encoder_s", "prefill_s", "decode_s", "host_s")]
        assert all(part > 0 for part in parts)
        assert float(row["rtfx"]) == pytest.approx(
            float(row["audio_s"]) / float(row["p50_s"]), rel=0.05
        )


def test_every_utterance_says_as_many_tokens_as_it_should() -> None:
    model = bench_inference.build("2/2", TINY, CPU, torch.float32)
    spoken = bench_inference.utterances(4, CPU, 5.0)
    clock = bench_inference.Clock(CPU)
    ours = bench_inference.Ours(model, spoken, clock)
    found = ours.transcribe()
    assert [len(tokens) for tokens in found] == spoken.limits
    assert len(set(spoken.limits)) > 1
    clock.take()
    ((whole, seconds),) = bench_inference.time_calls(ours.transcribe, clock, 1)
    assert set(seconds) == {"encode", "decode.admit", "decode.step"}
    assert 0 < sum(seconds.values()) < whole
    assert sum(bench_inference.split(whole, seconds).values()) == pytest.approx(whole)
    assert ours.transcribe() == found


def test_transformers_says_the_same(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    model = bench_inference.build("2/2", TINY, CPU, torch.float32)
    spoken = bench_inference.utterances(3, CPU, 4.0)
    peer = bench_inference.Peer(model, spoken)
    theirs = peer.transcribe()
    assert [len(tokens) for tokens in theirs] == spoken.limits
    ours = bench_inference.Ours(model, spoken, bench_inference.Clock(CPU))
    assert bench_inference.agreement(ours.transcribe(), theirs) > 0.8


def test_agreement_ends_where_the_texts_part() -> None:
    assert bench_inference.agreement([[1, 2, 3, 4], [5]], [[1, 9, 3, 4], [5]]) == 2 / 5
    assert bench_inference.agreement([[1, 2]], [[1, 2]]) == 1.0


def test_a_disagreement_stops_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Wrong:
        def __init__(self, model: object, spoken: object) -> None:
            del model, spoken

        def transcribe(self) -> list[list[int]]:
            return [[-5]] * 2

    monkeypatch.setattr(bench_inference, "Peer", Wrong)
    monkeypatch.setattr(bench_inference, "agreement", lambda ours, theirs: 0.5)
    assert (
        bench_inference.main(["--size", "tiny", "--shapes", "1/1", "--batch", "2", "--peer"]) == 1
    )
    assert "only 0.5000 of the tokens agree" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["4", "0/3", "a/b", "1/2/3"])
def test_wrong_shapes(shape: str) -> None:
    with pytest.raises(ValueError, match="must be ENCODER_LAYERS/DECODER_LAYERS"):
        bench_inference.build(shape, TINY, CPU, torch.float32)


@pytest.mark.parametrize("beam", [1, 3])
def test_rows_of_streams(beam: int, tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    options = ["--size", "tiny", "--shapes", "2/1", "--streams", "1", "3", "--chunks", "7"]
    assert (
        bench_inference.main(
            [*options, "--longest", "1.5", "--beam", str(beam), "--output", str(out)]
        )
        == 0
    )
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["streams"], row["utterances"], row["audio_s"]) for row in rows] == [
        ("1", "1", "1.5"),
        ("3", "3", "4.5"),
    ]
    for row in rows:
        assert (row["model"], row["method"]) == ("tiny, 2 encoder layers", "ctc")
        assert row["beam"] == str(beam)
        assert (row["context"], row["chunk_s"]) == ("64/0/7", "0.56")
        delays = [float(row[f"delay_p{share}_s"]) for share in (50, 90, 99)]
        assert 0 < delays[0] <= delays[1] <= delays[2]
        assert 0 < float(row["algorithmic_p50_s"]) < float(row["algorithmic_p99_s"]) < 0.56
        assert float(row["rtfx"]) > 0
        assert float(row["rss_end_mb"]) >= float(row["rss_minute_1_mb"]) > 1


@pytest.mark.parametrize("seconds", [0.1, 0.5])
def test_the_delay_of_a_stream_is_that_of_its_steps(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Each call of `decode` takes so long by the clock; a chunk comes every 0.24 s."""
    clock = iter(np.arange(10_000) * seconds)
    monkeypatch.setattr(streams.time, "perf_counter", lambda: next(clock))
    model = bench_inference.build_streaming("1/1", TINY, 3, CPU, torch.float32)
    recognizer = OnlineRecognizer(model, bench_inference.Numbers(), streams=2)  # type: ignore[arg-type]
    recordings = [0.1 * np.ones(samples, np.float32) for samples in (33_000, 20_000, 1280)]
    served = streams.serve(recognizer, recordings, 1)
    assert served.audio_s == pytest.approx(54_280 / 16_000)
    assert all(text.split() for text in served.texts)
    # 9 + 6 + 1 chunks; the last of each recording is known to be when all of it has come.
    assert len(served.delays_s) == 16
    assert served.algorithmic_s.total() == 26 + 16 + 1
    # The last window of a chunk reaches 41 samples beyond it.
    expected = [(41 + 1280 * later) / 16_000 for later in (2, 1, 0)]
    assert list(served.algorithmic_s)[:3] == pytest.approx(expected)
    # All chunks but the last of a recording.
    assert list(served.algorithmic_s.values())[:3] == [8 + 5] * 3
    assert seconds - 1e-6 < min(served.delays_s) < 1.1 * seconds
    late = sum(delay > seconds + 1e-6 for delay in served.delays_s)
    # The end of a recording may come during the step before; slow steps are always late.
    assert late <= 3 if seconds < 0.2 else late > 8
    assert max(served.delays_s) < 2 * seconds
