"""Second pass: ranks, earlier segments as context, order of lists, and the commands."""

import itertools
import json
import math

import pytest
import torch

from effasr.decoding.second_pass.causal_scorer import CausalScorer
from effasr.transcription.results import Alternative, Failure, Segment, Transcription
from effasr.transcription.second_pass.rescore import SecondPass
from tests.support.chat_folder import write_chat_model
from tests.support.recognition import write_set


class Scripted:
    """Gives each text a score by its words, and a bonus for a word that was said before."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str]]] = []

    def log_probs(self, texts):
        self.calls.append(list(texts))
        return [
            -1.0 * len(local.split()) + 3.0 * len(set(local.split()) & set(before.split()))
            for before, local in texts
        ]


def segment(*pairs: tuple[str, float]) -> Segment:
    listed = tuple(Alternative(text, score, score) for text, score in pairs)
    return Segment(0.0, 1.0, listed[0].text, alternatives=listed)


def recording(name: str, *segments: Segment) -> Transcription:
    return Transcription(name, 1.0, " ".join(item.text for item in segments), segments)


def test_earlier_segments_decide_between_equal_sounds() -> None:
    second = segment(("blew away", -1.0), ("blue away", -1.5), ("blue away", -9.0))
    results = [
        recording("a", segment(("the blue sea", -1.0)), second),
        Failure("b", "broken"),
        recording("c", second),
        recording("d"),
    ]
    scorer = Scripted()
    result = list(SecondPass(scorer, 1.0).results(results))
    assert result[1] is results[1]
    assert result[3] == results[3]
    assert [item.text for item in result[0].segments] == ["the blue sea", "blue away"]
    assert result[0].text == "the blue sea blue away"
    assert result[2].text == "blew away"
    best, *_ = result[0].segments[1].alternatives
    assert (best.score, best.lm_score, best.rank) == (-1.5, 1.0, -0.5)
    # The first segments of all in one pass, then the second ones; equal texts once.
    first, following = scorer.calls
    assert first == [("", "the blue sea"), ("", "blew away"), ("", "blue away")]
    assert following == [("the blue sea", "blew away"), ("the blue sea", "blue away")]
    (alone,) = SecondPass(Scripted(), 1.0, context_segments=0).results(results[:1])
    assert alone.segments[1].text == "blew away"


def test_weights_are_those_of_the_rank() -> None:
    item = recording("a", segment(("x y z", -3.0), ("x", -3.5)))
    for weight, bonus in itertools.product((0.0, 0.2, 1.0), (0.0, 0.5)):
        (result,) = SecondPass(Scripted(), weight, bonus).results([item])
        ranks = {"x y z": -3.0 + 3 * (bonus - weight), "x": -3.5 + bonus - weight}
        assert result.text == max(ranks, key=lambda text: ranks[text])
        for other in result.segments[0].alternatives:
            assert other.rank == pytest.approx(ranks[other.text])


@pytest.fixture
def requested(saved, noise, tmp_path) -> tuple:
    """A transcription of a recording that is in a manifest, too."""
    write_set(tmp_path, [noise(2.6, seed=6)], ["one two"])
    return ("--run", saved, "--device", "cpu", "--method", "ctc", "--beam", "4")


def test_commands_choose_by_the_second_model(effasr, tmp_path, requested) -> None:
    torch.manual_seed(1)
    folder, wave = write_chat_model(tmp_path / "lm"), tmp_path / "u0.wav"
    second = ("--second-lm", folder, "--second-lm-weight", "5")
    result = effasr("transcribe", *requested, wave, "--json", *second).segment
    listed = result["alternatives"]
    assert len(listed) == 4
    assert listed[0]["text"] == result["text"]
    ranks = [item["score"] + 5 * item["lm_score"] for item in listed]
    assert ranks == sorted(ranks, reverse=True)
    scores = CausalScorer(folder).log_probs([("", item["text"]) for item in listed])
    assert [item["lm_score"] for item in listed] == pytest.approx(scores, abs=1e-4)
    assert effasr("transcribe", *requested, wave, "--second-lm", folder).code == 0
    command = ("evaluate", *requested, "--manifest", tmp_path / "set.jsonl", *second)
    assert effasr(*command, "--output", tmp_path / "out").code == 0
    hypothesis = json.loads((tmp_path / "out/hypotheses.jsonl").read_text())
    assert hypothesis["hypothesis"] == result["text"]
    assert math.isfinite(json.loads((tmp_path / "out/wer.json").read_text())["oracle"]["wer"])
    refused = effasr("transcribe", *requested, wave, *second, "--words").error
    assert "`words` must be false with `second_lm`" in refused


def test_word_ngrams_choose_as_well(effasr, tmp_path, requested) -> None:
    command = ("transcribe", *requested, tmp_path / "u0.wav", "--json")
    plain = effasr(*command, "--nbest", "4").segment
    first, *texts = (item["text"] for item in plain["alternatives"])
    (word, *_) = sorted(set().union(*(text.split() for text in texts)) - set(first.split()))
    lines = ["\\data\\", "ngram 1=2", "\\1-grams:", "-9\t<unk>", f"-0.1\t{word}", "\\end\\"]
    (tmp_path / "words.arpa").write_text("\n".join(lines) + "\n")
    options = ("--second-lm", tmp_path / "words.arpa", "--second-lm-weight", "9")
    result = effasr(*command, *options, "--second-word-bonus", "186").segment
    assert word in result["text"].split()
    best = result["alternatives"][0]
    existing = sum(item == word for item in best["text"].split())
    other_items = len(best["text"].split()) - existing
    assert best["lm_score"] == pytest.approx(-math.log(10) * (0.1 * existing + 9 * other_items))
