"""What tokenizer, prepare and train report about frames per token, before the first step."""

import json

import numpy as np
import pytest
import soundfile

from effasr.data.tokenizer import load_tokenizer

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards")


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """A manifest of noise with texts of 15 characters a second, as of a fast reader."""
    folder, generator = tmp_path_factory.mktemp("fast"), np.random.default_rng(0)
    lines = []
    for number in range(60):
        text = " ".join(generator.choice(WORDS, size=int(generator.integers(3, 9))))
        audio = generator.normal(0, 0.1, size=len(text) * 16_000 // 15).astype(np.float32)
        soundfile.write(folder / f"{number}.wav", audio, 16_000)
        row = {"audio_filepath": f"{number}.wav", "text": text, "speaker": f"s{number % 2}"}
        lines.append(json.dumps(row | {"duration": len(audio) / 16_000}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def small_tokenizer(fast):
    from effasr.cli.main import main

    command = ["tokenizer", f"{fast}/train.jsonl", f"{fast}/small", "--vocab-size", "34"]
    assert main(command) == 0
    return fast / "small"


def warned(text):
    joined = " ".join(line.strip() for line in text.splitlines())
    assert all(len(line) <= 100 for line in text.splitlines() if "frames per token" in line)
    return "warning: CTC learns late or not at all" in joined


def test_tokenizer_reports_and_warns(effasr, fast, tmp_path):
    done = effasr("tokenizer", fast / "train.jsonl", tmp_path / "t", "--vocab-size", "34")
    assert "60 utterances" in done.out
    assert "2 speakers" in done.out
    assert "frames per token (8x): median" in done.out
    assert warned(done.out)


def test_auto_chooses_a_vocabulary_that_needs_no_warning(effasr, fast, tmp_path):
    out = tmp_path / "auto"
    done = effasr("tokenizer", fast / "train.jsonl", out, "--vocab-size", "auto")
    assert done.code == 0, done.err
    assert not warned(done.out)
    assert load_tokenizer(out).vocab_size > 34
    refused = effasr("tokenizer", fast / "train.jsonl", out, "--vocab-size", "some")
    assert "must be an integer" in refused.error


def test_languages_can_share_the_pieces(effasr, tmp_path):
    lines = [
        {"source_lang": "de", "target_lang": "de", "source_text": "ein haus", "text": "ein haus"},
        {"source_lang": "de", "target_lang": "en", "source_text": "ein haus", "text": "a house"},
    ]
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines * 9))
    given = ("tokenizer", texts, tmp_path / "shared", "--shared")
    done = effasr(*given, "--vocab-size", "20")
    assert done.code == 0, done.err
    shared = load_tokenizer(tmp_path / "shared")
    assert shared.encode("haus", "de") == shared.encode("haus", "en")
    assert (
        "`--vocab-size` must be a number with --shared"
        in effasr(*given, "--vocab-size", "auto").error
    )


def test_prepare_reports_with_the_tokens_it_has_counted(effasr, fast, small_tokenizer, tmp_path):
    manifest = fast / "train.jsonl"
    plain = effasr("prepare", manifest, tmp_path / "plain")
    assert "2 speakers" in plain.out
    assert "frames per token" not in plain.out
    at_eight = effasr("prepare", manifest, tmp_path / "eight", "--tokenizer", small_tokenizer)
    assert warned(at_eight.out)
    report = json.loads((tmp_path / "eight/report.json").read_text())
    impossible = report["by_reason"]["ctc_infeasible"]["utterances"] / 60
    assert f"too few for CTC in {100 * impossible:.0f} %" in at_eight.out


def test_train_warns_before_the_first_step(effasr, fast, small_tokenizer, tmp_path):
    (tmp_path / "r.yaml").write_text(
        f"""\
name: hard
output: {tmp_path}/runs
model:
  ctc: true
  features: {{mel_bins: 16}}
  encoder: {{width: 16, layers: 1, heads: 2, feed_forward: 16, subsampling_channels: 4}}
  decoder: {{width: 16, layers: 1, heads: 2, feed_forward: 16, max_positions: 128}}
data:
  train: {fast}/train.jsonl
  tokenizer: {small_tokenizer}
  frame_budget: 100
  workers: 0
  filters: {{max_dropped: 1.0}}
training: {{max_steps: 1, log_every: 1, device: cpu}}
"""
    )
    hard = effasr("train", tmp_path / "r.yaml")
    assert hard.code == 0, hard.err
    before, _, _ = hard.err.partition("step 1/1")
    assert "2 speakers" in before
    assert "frames per token (8x): median" in before
    assert warned(before)
    without = effasr("train", tmp_path / "r.yaml", "name=decoder", "model.ctc=false")
    assert without.code == 0, without.err
    assert not warned(without.err)
