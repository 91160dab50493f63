"""The study of language models: its n-grams are distributions, and it measures all systems."""

import csv
import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import second_pass as study
import soundfile
import torch
from correction import runs
from ngram_estimate import arpa

from effasr import checkpoint
from effasr.cli.main import build_parser
from effasr.decoding.lm.words import load_word_ngrams
from effasr.model.asr import ASRModel
from effasr.model.text_encoder import TextEncoderConfig
from tests.support.recognition import model, noise, tokenizer

__all__ = ["model", "noise", "tokenizer"]


def test_estimated_probabilities_sum_to_one(tmp_path) -> None:
    draw = random.Random(0)
    texts = [draw.choices("abcd", k=draw.randrange(6)) for _ in range(40)]
    for order in (1, 2, 3):
        path = tmp_path / f"{order}.arpa"
        path.write_text(arpa(texts, order))
        lm = load_word_ngrams(path)
        assert lm.order == order
        for n in range(4):
            for before in itertools.product("abx", repeat=n):
                words = ("a", "b", "c", "d", "</s>", "unknown")
                found = lm.log_probs([(" ".join(before), word) for word in words])
                assert math.isclose(sum(map(math.exp, found)), 1.0, abs_tol=1e-5)


def test_frequent_words_are_likely(tmp_path) -> None:
    path = tmp_path / "lm.arpa"
    path.write_text(arpa([["a", "b"]] * 9 + [["a", "c"]], 2))
    often, seldom, never = load_word_ngrams(path).log_probs([("a", "b"), ("a", "c"), ("a", "a")])
    # Witten-Bell: 10 times a word follows a, of 2 kinds; unigrams have 30 of 4 kinds, and 1 / 5.
    lower = (10 + 4 * 0.2 - 1) / 34
    assert math.isclose(math.exp(often), (9 + 2 * lower) / 12, rel_tol=1e-5)
    assert often > seldom > never


def test_systems_are_measured_once(tmp_path, model, tokenizer, noise, capsys) -> None:
    checkpoint.save_model(tmp_path / "model", model, tokenizer)
    for name in ("train", "dev", "test"):
        lines = []
        for number in range(3):
            path = tmp_path / f"{name}{number}.wav"
            soundfile.write(path, noise(0.6 + 0.3 * number, seed=number), 16_000)
            row = {"audio_filepath": str(path), "text": "one two three", "id": f"{name}{number}"}
            lines.append(json.dumps(row) + "\n")
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    out = tmp_path / "rows.csv"
    options = [str(tmp_path), str(tmp_path / "model"), "--csv", str(out), "--beam", "3"]
    options += ["--work", str(tmp_path / "work"), "--device", "cpu", "--limit", "2"]
    assert study.main([*options, "--methods", "ctc"]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["system"] for row in rows] == [
        "best",
        "oracle",
        "fusion",
        "word_fusion",
        "second_pass",
    ]
    assert 0 <= float(rows[0]["ece_raw"]) <= 1
    assert {row["ece_raw"] for row in rows[1:]} == {""}
    found = {row["system"]: float(row["wer"]) for row in rows}
    assert found["oracle"] <= min(found["best"], found["second_pass"])
    assert {row["utterances"] for row in rows} == {"2"}
    assert {row["steps"] for row in rows} == {""}
    assert rows[4]["weights"].startswith("second_lm_weight=")
    capsys.readouterr()
    assert study.main([*options, "--methods", "ctc"]) == 0
    assert capsys.readouterr().out == ""

    torch.manual_seed(0)
    encoder = TextEncoderConfig(layers=1, heads=2, feed_forward=32)
    reader = ASRModel(replace(model.config, text_encoder=encoder), tokenizer.vocab_size)
    checkpoint.save_model(tmp_path / "corrector", reader, tokenizer)
    options += ["--corrector", str(tmp_path / "corrector"), "--corrector-nbest", "2"]
    assert study.main([*options, "--methods", "ctc"]) == 0
    *before, row = csv.DictReader(out.read_text().splitlines())
    assert before == rows
    assert (row["system"], row["nbest"]) == ("corrector", "2")
    assert row["weights"].startswith("corrector_margin=")


def test_models_of_a_seed_are_trained_by_commands(tmp_path, monkeypatch) -> None:
    """What the commands do is tested elsewhere: here they write what they would have written."""
    settings = runs.Settings(tmp_path, 20, 10, 30, 4, 3, ("attention", "ctc"), "cpu")
    lines = {
        method: [
            json.dumps({"id": f"u{n}", "source_text": "a | b", "text": "a", "source": method})
            for n in range(30)
        ]
        for method in settings.methods
    }
    typed = []

    def run(words: list[str]) -> int:
        parsed = build_parser().parse_args(words)
        typed.append(parsed)
        if parsed.command == "make-correction-data":
            parsed.out.parent.mkdir(parents=True, exist_ok=True)
            parsed.out.write_text("\n".join(lines[parsed.source]) + "\n")
        return 0

    class Corpus:
        train = tmp_path / "held_out" / "train.jsonl"

    monkeypatch.setattr(runs, "main", run)
    monkeypatch.setattr(runs, "build", lambda *args, **kwargs: Corpus)
    recognizer = runs.recognizer(settings, Path("corpus"), 5)
    corrector = runs.corrector(settings, recognizer, "demo_5", 5)
    assert (recognizer, corrector) == (
        tmp_path / "runs" / "demo_5_20",
        tmp_path / "runs" / "corrector_demo_5_10",
    )
    commands = [one.command for one in typed]
    lists = ["make-correction-data"] * 2
    assert commands == ["tokenizer", "train", *lists, "tokenizer", "train"]
    assert {str(one.run) for one in typed[2:4]} == {str(recognizer)}
    assert "seed=5" in typed[1].overrides
    assert "training.max_steps=10" in typed[5].overrides
    folder = tmp_path / "pairs_demo_5"
    found = {
        part: [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "dev")
    }
    names = {part: {row["id"] for row in rows} for part, rows in found.items()}
    assert not names["train"] & names["dev"]
    assert {part: len(rows) for part, rows in found.items()} == {"train": 30, "dev": 30}
    assert {row["source"] for row in found["dev"]} == {"attention", "ctc"}
