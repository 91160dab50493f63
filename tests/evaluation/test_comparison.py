import math
from dataclasses import replace

import numpy as np
import pytest

from effasr.evaluation.alignment import align, trn_line
from effasr.evaluation.bootstrap import interval, probability_of_improvement
from effasr.evaluation.comparison import compare, read_run
from effasr.evaluation.result import Evaluation, ScoredUtterance, save
from effasr.evaluation.wer import ErrorCounts, count_errors
from effasr.transcription.results import Failure


def counts(errors: int, words: int) -> ErrorCounts:
    return ErrorCounts(utterances=1, words=words, substitutions=errors)


def evaluated(pairs: list[tuple[str, str]], **fields: object) -> Evaluation:
    utterances = tuple(
        ScoredUtterance(f"u{i}", "en", ref, hyp, 2.0, count_errors(ref, hyp))
        for i, (ref, hyp) in enumerate(pairs)
    )
    return Evaluation(**{"normalizer": "none", "utterances": utterances, "seconds": 1.0} | fields)


def test_the_interval_is_that_of_a_binomial_where_there_is_one():
    """One word an utterance, 20 % of them wrong."""
    low, high = interval([counts(int(i % 5 == 0), 1) for i in range(2000)])
    sigma = math.sqrt(0.2 * 0.8 / 2000)
    assert low == pytest.approx(0.2 - 1.96 * sigma, abs=0.002)
    assert high == pytest.approx(0.2 + 1.96 * sigma, abs=0.002)
    assert interval([counts(int(i % 5 == 0), 1) for i in range(2000)]) == (low, high)


def test_intervals_of_little():
    assert interval([counts(1, 4)]) == (0.25, 0.25)
    assert all(map(math.isnan, interval([])))
    assert all(map(math.isnan, interval([counts(2, 0)])))


def test_an_improvement_everywhere_is_certain_and_none_is_a_coin_toss():
    before = [counts(1 + i % 3, 10) for i in range(50)]
    after = [counts(i % 3, 10) for i in range(50)]
    assert probability_of_improvement(before, after) == 1.0
    assert probability_of_improvement(after, before) == 0.0
    assert probability_of_improvement(before, before) == 0.5
    mixed = [counts(1 + (i + 1) % 3, 10) for i in range(51)]
    assert 0.2 < probability_of_improvement([counts(1 + i % 3, 10) for i in range(51)], mixed) < 0.8
    with pytest.raises(ValueError, match="`after` must have the 50 utterances"):
        probability_of_improvement(before, after[1:])


def test_words_stand_above_each_other():
    aligned = align("the cat sat on mat", "the bat sat on the mat now")
    assert aligned.lines() == [
        "REF:  the CAT sat on *** mat ***",
        "HYP:  the BAT sat on THE mat NOW",
        "Eval:     S          I       I",
    ]
    assert aligned.scores() == "Scores: (#C #S #D #I) 4 1 0 2"
    assert align("a b", "").kinds == ("D", "D")
    assert align("", "a").lines()[0] == "REF:  *"
    assert trn_line("one  two", "u-1") == "one two (u-1)\n"
    assert trn_line("", "u-1") == "(u-1)\n"


@pytest.mark.parametrize("seed", range(5))
def test_alignments_count_what_the_error_rate_counts(seed):
    rng = np.random.default_rng(seed)
    item, other = (" ".join(rng.choice(list("abcd"), rng.integers(0, 9))) for _ in range(2))
    errors, kinds = count_errors(item, other), align(item, other).kinds
    assert kinds.count("S") == errors.substitutions
    assert kinds.count("D") == errors.deletions
    assert kinds.count("I") == errors.insertions
    assert len(kinds) - kinds.count("I") == errors.words


def test_runs_side_by_side(effasr, tmp_path):
    texts = [f"a b c {i}" for i in range(30)]
    good = evaluated([(text, text) for text in texts])
    failures = (Failure("u0", "damaged"),)
    bad = evaluated([(text, text.replace("a", "x")) for text in texts], failures=failures)
    save(bad, tmp_path / "first" / "evaluation" / "dev")
    save(good, tmp_path / "second" / "evaluation" / "dev")
    save(good, tmp_path / "second" / "evaluation" / "test")
    lines = effasr("compare", tmp_path / "first", tmp_path / "second").out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    other = [replace(utterance, id=f"v{i}") for i, utterance in enumerate(good.utterances[:9])]
    save(replace(good, utterances=tuple(other)), tmp_path / "third" / "evaluation" / "dev")
    *_, note = effasr("compare", tmp_path / "first", tmp_path / "third").out.splitlines()
    assert note.startswith("dev: third has 0 of the 30 utterances of first, and 9 in all: their")
    assert [row[:4] for row in rows] == [
        ["dev", "first", "30 (-1)", "25.00"],
        ["dev", "second", "30", "0.00"],
        ["test", "second", "30", "0.00"],
    ]
    assert rows[1][-1] == "-25.00 (better: 100 %)"
    assert rows[0][-1] == ""
    assert "dev" not in effasr("compare", tmp_path / "second", "--set", "test").out


def test_a_folder_with_another_name_than_its_set_names_the_system(tmp_path, monkeypatch):
    done = evaluated([("one", "one")])
    save(done, tmp_path / "a" / "evaluation" / "dev")
    save(done, tmp_path / "beam4", of_set="dev")
    save(done, tmp_path / "system" / "dev", of_set="dev")
    monkeypatch.chdir(tmp_path)
    result = [read_run(path) for path in ("a", "beam4", "system/dev")]
    names = [(item.system, item.set_name) for (item,) in result]
    assert names == [("a", "dev"), ("beam4", "dev"), ("system", "dev")]
    save(done, tmp_path / "a" / "evaluation" / "beam4", of_set="dev")
    for path, system in (("dev", "a"), ("beam4", "a/beam4")):
        (item,) = read_run(f"a/evaluation/{path}")
        assert (item.system, item.set_name) == (system, "dev")
    save(done, tmp_path / "more" / "beam4", of_set="dev")
    alike = [item for path in ("beam4", "more/beam4") for item in read_run(path)]
    table = compare(alike)
    assert "beam4 (1)" in table
    assert "beam4 (2)" in table
    monkeypatch.chdir("system/dev")
    assert [(item.system, item.set_name) for item in read_run(".")] == [("system", "dev")]


def test_what_cannot_be_compared(effasr, tmp_path):
    save(evaluated([("one", "one")]), tmp_path / "dev")
    refused = effasr("compare", tmp_path / "dev", "--set", "test").error
    assert "`--set` must be one of dev, but is 'test'" in refused
    (tmp_path / "dev" / "hypotheses.jsonl").write_text("{")
    assert "not an evaluation that can be read" in effasr("compare", tmp_path / "dev").error
