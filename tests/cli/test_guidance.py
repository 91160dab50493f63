"""What tokenizer, prepare and train report about frames per token, before the first step."""

import json
import re

import numpy as np
import pytest
import soundfile

from effasr.cli.main import main
from effasr.config import load
from effasr.data.tokenizer import load_tokenizer
from effasr.training.config import TrainConfig
from tests.cli.conftest import write_rows

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "wizards")


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """A manifest of noise with texts of 15 characters a second, as of a fast reader."""
    folder, generator = tmp_path_factory.mktemp("fast"), np.random.default_rng(0)
    rows = []
    for number in range(60):
        text = " ".join(generator.choice(WORDS, size=int(generator.integers(3, 9))))
        audio = generator.normal(0, 0.1, size=len(text) * 16_000 // 15).astype(np.float32)
        soundfile.write(folder / f"{number}.wav", audio, 16_000)
        row = {"audio_filepath": f"{number}.wav", "text": text, "speaker": f"s{number % 2}"}
        rows.append(row | {"duration": len(audio) / 16_000})
    write_rows(folder / "train.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def small_tokenizer(fast):
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


def test_languages_can_share_the_pieces(effasr, tmp_path):
    lines = [
        {"source_lang": "de", "target_lang": "de", "source_text": "ein haus", "text": "ein haus"},
        {"source_lang": "de", "target_lang": "en", "source_text": "ein haus", "text": "a house"},
    ]
    texts = write_rows(tmp_path / "texts.jsonl", lines * 9)
    done = effasr("tokenizer", texts, tmp_path / "shared", "--shared", "--vocab-size", "20")
    assert done.code == 0, done.err
    shared = load_tokenizer(tmp_path / "shared")
    assert shared.encode("haus", "de") == shared.encode("haus", "en")


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


@pytest.mark.parametrize(("seconds", "noise", "told"), [(0.05, 0.0, True), (0.4, 1e-3, False)])
def test_prepare_tells_where_no_utterance_has_silence_at_its_ends(
    effasr, tmp_path, seconds, noise, told
):
    """With the command that it names, training adds some."""
    rng, rows = np.random.default_rng(0), []
    for number in range(20):
        ends = np.zeros(int(seconds * 16_000))
        voice = 0.1 * rng.standard_normal(16_000) * np.sin(np.arange(16_000) / 900) ** 2
        audio = np.concatenate([ends, voice, ends])
        audio += noise * rng.standard_normal(len(audio))
        soundfile.write(tmp_path / f"{number}.wav", audio, 16_000)
        rows.append({"audio_filepath": f"{number}.wav", "text": "one"})
    done = effasr("prepare", write_rows(tmp_path / "a.jsonl", rows), tmp_path / "out")
    assert done.code == 0, done.err
    assert ("silence of 0.3 s or more at an end: in 0 %" in done.out) == told
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["silent_ends"] == (0 if told else 20)
    if told:
        override = re.findall(r"set\s+(data\.silence_padding\S+)", done.out)
        assert load(TrainConfig, "small", override).data.silence_padding is not None


def test_train_warns_before_the_first_step(train, fast, small_tokenizer):
    overrides = (
        f"data.train={fast}/train.jsonl", "data.validation=[]", f"data.tokenizer={small_tokenizer}",
        "data.frame_budget=100", "data.filters.max_dropped=1", "model.decoder.max_positions=128",
        "training.max_steps=1",
    )  # fmt: skip
    hard = train(*overrides)
    assert hard.code == 0, hard.err
    before, _, _ = hard.err.partition("step 1/1")
    assert "2 speakers" in before
    assert "frames per token (8x): median" in before
    assert warned(before)
    without = train(*overrides, "name=decoder", "model.ctc=false")
    assert without.code == 0, without.err
    assert not warned(without.err)
