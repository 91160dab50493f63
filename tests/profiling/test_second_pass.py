"""The study of language models: its n-grams are distributions, and it measures all systems."""

import csv
import itertools
import json
import math
import random

import second_pass as study
import soundfile
from ngram_estimate import arpa

from effasr import checkpoint
from effasr.decoding.lm.words import load_word_ngrams
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
    found = {row["system"]: float(row["wer"]) for row in rows}
    assert found["oracle"] <= min(found["best"], found["second_pass"])
    assert {row["utterances"] for row in rows} == {"2"}
    assert rows[4]["weights"].startswith("second_lm_weight=")
    capsys.readouterr()
    assert study.main([*options, "--methods", "ctc"]) == 0
    assert capsys.readouterr().out == ""
