import csv
from pathlib import Path

import bench_inference
import pytest
import torch

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
