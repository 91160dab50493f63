"""Choice of weights on n-best lists: planted weights, chance, and the command."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from effasr.cli.main import build_parser
from effasr.cli.options import decoding_config
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.hypothesis import ScoreParts
from effasr.evaluation.evaluate import evaluate, openable_cuts
from effasr.evaluation.translation import TranslationCounts, count_ngrams
from effasr.evaluation.tuning.decoding_file import write_decoding
from effasr.evaluation.tuning.tune import tune
from effasr.evaluation.tuning.weights import GRIDS, NBestLists, Weights, best_weights, tunable
from effasr.evaluation.wer import count_errors
from effasr.transcription.results import Alternative, Segment, Transcription
from tests.support.recognition import write_set

SECOND = DecodingConfig(beam=4, nbest=4, second_lm=Path("lm"))
JOINT = DecodingConfig(beam=4, nbest=4, ctc_weight=0.3)


def bleu(reference: str, text: str) -> TranslationCounts:
    return count_ngrams(reference, text, "en")


def draw_lists(
    config, start, truth=None, *, count=150, size=4, segments=1, seed=0, judge=count_errors
) -> NBestLists:
    """Lists of random scores; the references are what ``truth`` chooses, or chance."""
    draw = np.random.default_rng(seed)
    utterances = []
    for number in range(count):
        parts, texts = [], []
        for _ in range(segments):
            listed, ranks = [], []
            for place in range(size):
                local, ctc, lm = draw.normal(-20, 3, 3)
                # Without a truth, texts of one length: a shorter one has fewer insertions.
                words = int(draw.integers(2, 7))
                text = " ".join(f"w{place}x{n}" for n in range(4 if truth is None else words))
                provided = _rank(config, start, local, ctc, lm, words)
                divided = ScoreParts(local, ctc, None, words + 1)
                listed.append(Alternative(text, local, provided, lm, divided))
                ranks.append(
                    draw.random() if truth is None else _rank(config, truth, local, ctc, lm, words)
                )
            parts.append(Segment(0.0, 1.0, listed[0].text, alternatives=tuple(listed)))
            texts.append(listed[int(np.argmax(ranks))].text)
        message = Transcription(str(number), 1.0, "", tuple(parts))
        utterances.append((" ".join(texts), message))
    return NBestLists(utterances, config, start, [judge] * len(utterances))


def _rank(config, weights, own, ctc, lm, words) -> float:
    score = (1 - weights.ctc_weight) * own + weights.ctc_weight * ctc
    if config.second_lm is None:
        return score / ((6 + words) / 6) ** weights.length_penalty
    return score + weights.second_lm_weight * lm + weights.second_word_bonus * words


@pytest.mark.parametrize(("segments", "judge"), [(1, count_errors), (2, count_errors), (1, bleu)])
@pytest.mark.parametrize(
    ("config", "planted"),
    [
        (SECOND, {"second_lm_weight": 0.7, "second_word_bonus": 2.0}),
        (JOINT, {"ctc_weight": 0.8, "length_penalty": 0.4}),
    ],
)
def test_planted_weights_are_found(config, planted, segments, judge):
    start = Weights.from_config(config, "attention")
    truth = replace(start, **planted)
    lists = draw_lists(config, start, truth, segments=segments, judge=judge)
    assert sum(lists.word_errors(start)) > 50
    result = best_weights(lists, start, {name: GRIDS[name] for name in planted})
    assert sum(lists.word_errors(result)) == pytest.approx(0, abs=1e-9)
    assert result == truth


def test_a_gain_by_chance_changes_nothing():
    """With references by chance, the best weights of many gain on every set."""
    start = Weights.from_config(SECOND, "attention")
    names = ("second_lm_weight", "ctc_weight", "second_word_bonus")
    grids = {name: GRIDS[name] for name in names}
    gains, changed = [], 0
    for seed in range(20):
        lists = draw_lists(SECOND, start, seed=seed, count=60, size=8)
        changed += best_weights(lists, start, grids) != start
        gains.append(lists.word_errors(start).sum() - lists.tried().sum(axis=1).min())
    assert sum(gain > 0 for gain in gains) >= 19
    assert changed <= 3


def test_a_weight_without_effect_or_choice_stays():
    start = Weights.from_config(JOINT, "attention")
    lists = draw_lists(JOINT, start, replace(start, ctc_weight=0.8))
    result = best_weights(lists, start, {name: GRIDS[name] for name in ("ctc_weight", "lm_weight")})
    assert result == replace(start, ctc_weight=0.8)
    start = Weights.from_config(SECOND, "attention")
    grids = {name: GRIDS[name] for name in ("second_lm_weight", "second_word_bonus")}
    for options in ({"size": 1}, {"count": 0}):
        assert best_weights(draw_lists(SECOND, start, **options), start, grids) == start


def test_what_the_weights_do_not_explain_is_kept():
    """Ranks of the search may have more in them, such as coverage."""
    start = Weights.from_config(JOINT, "attention")
    pair = [("a", -5.0, 1.0), ("b", -4.0, 0.0)]
    listed = tuple(
        Alternative(
            text, local, local * 0.7 + 0.3 * local + more, None, ScoreParts(local, local, None, 1)
        )
        for text, local, more in pair
    )
    message = Transcription("u", 1.0, "a", (Segment(0.0, 1.0, "a", alternatives=listed),))
    start = replace(start, length_penalty=0.0)
    lists = NBestLists([("a", message)], JOINT, start, [count_errors])
    assert lists.choices(start).tolist() == [0]


def test_texts_of_a_fallback_stay_whatever_the_weights(model, tokenizer, noise, tmp_path):
    """Where the search is stopped, greedy CTC has written them, without parts of a score."""
    manifest = write_set(tmp_path, [noise(0.8, seed=1), noise(1.3, seed=2)], ["one two"] * 2)
    cuts, _, _ = openable_cuts(manifest, prompt=Prompt())
    config = DecodingConfig(beam=4, ctc_weight=0.5, tokens_per_frame=0.2, extra_tokens=2)
    listed = replace(config, nbest=4)
    alternatives = [
        x.alternatives for x in evaluate(model, tokenizer, cuts, config=listed).utterances
    ]
    assert list(map(len, alternatives)) == [1, 1]
    tuned = tune(model, tokenizer, cuts, config)
    assert (tuned.before, tuned.changed) == (tuned.oracle, False)


def test_only_weights_with_an_effect_are_tuned(model, tdt_model):
    assert tunable(model, JOINT, "attention") == ("ctc_weight", "length_penalty")
    names = ("ctc_weight", "second_lm_weight", "second_word_bonus")
    assert tunable(model, SECOND, "attention") == names
    assert tunable(tdt_model, SECOND, "transducer") == names[1:]
    with pytest.raises(ValueError, match="`method` transducer must have a weight to tune"):
        tunable(tdt_model, DecodingConfig(beam=4), "transducer")


def parsed(*words: str) -> DecodingConfig:
    return decoding_config(build_parser().parse_args(["evaluate", "--run", "r", *words]))


def test_options_of_a_file_are_those_of_the_command_line(tmp_path):
    lm = tmp_path / "a.arpa"
    options = ["--manifest", "m", "--beam", "6", "--method", "attention", "--ctc-weight", "0.4"]
    options += ["--lm", str(lm), "--lm-weight", "0.2", "--second-lm", str(tmp_path / "b")]
    options += ["--second-lm-weight", "0.5", "--second-word-bonus", "1"]
    config, path = parsed(*options), tmp_path / "new" / "decoding.yaml"
    write_decoding(path, config, "tuned on a\nset")
    assert path.read_text().startswith("# tuned on a\\nset\n")
    again = ["--manifest", "m", "--decoding", str(path)]
    assert parsed(*again) == config
    assert parsed(*again, "--ctc-weight", "0", "--beam", "3") == replace(
        config, ctc_weight=0.0, beam=3, nbest=3
    )
    other = parsed(*again, "--lm", "other.arpa")
    assert (other.lm, other.lm_weight) == (Path("other.arpa"), None)
    assert parsed(*again, "--second-lm", "other").second_lm_weight is None
    assert parsed(*again, "--lm", os.path.relpath(lm)).lm_weight == 0.2
    path.write_text("beams: 4\n")
    with pytest.raises(ValueError, match=r"unknown field.*did you mean `beam`"):
        parsed(*again)


def test_the_command_tunes_on_a_set(effasr, tmp_path, saved, noise):
    sounds = [noise(0.8 + 0.3 * number, seed=number) for number in range(3)]
    manifest, out = write_set(tmp_path, sounds, ["one two three"] * 3), tmp_path / "tuned.yaml"
    command = ("tune", saved, manifest, "--device", "cpu")
    assert "`--output` must be given" in effasr(*command).error
    done = effasr(*command, "--beam", "4", "--output", out)
    provided, tuned = (
        line for line in done.out.splitlines() if line.startswith(("| given", "| tuned"))
    )
    assert len(provided.split("|")) == len(tuned.split("|")) == 7
    assert "of 4 alternatives (oracle)" in done.out
    assert out.read_text().startswith("# effasr tune on set: 3 utterances, WER of the choice among")
    rows = manifest.read_text().replace("{", '{"lang": "en", "target_lang": "de", ')
    manifest.write_text(rows)
    done = effasr(*command[:2], manifest, *command[3:], "--beam", "4", "--output", out)
    assert "| BLEU |" in " ".join(done.out.split())
    assert "utterances, BLEU of the choice among" in out.read_text()
    command = ("evaluate", "--run", saved, "--manifest", manifest, "--device", "cpu")
    assert effasr(*command, "--decoding", out, "--nbest", "4").code == 0
