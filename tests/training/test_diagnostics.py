"""Each detector on figures where it must speak, and where it must not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from effasr.evaluation.result import Evaluation, ScoredUtterance
from effasr.evaluation.wer import ErrorCounts, count_errors
from effasr.training.config import DiagnosticsConfig
from effasr.training.diagnostics import examples
from effasr.training.diagnostics.detectors import (
    AudioUse,
    Blanks,
    CTCBaseline,
    CTCPlateau,
    ErrorBalance,
    Overfitting,
    Repetition,
    StuckErrorRate,
    Validation,
    count_loops,
    is_loop,
)
from effasr.training.diagnostics.monitor import Diagnostics
from effasr.training.diagnostics.probe import ProbeSums

CONFIG = DiagnosticsConfig()
SHORT = CTCBaseline(loss=4.0, entropy=4.1, frames_per_token=1.8)
LONG = replace(SHORT, frames_per_token=4.0)


def errors(words=100, insertions=0, deletions=0, substitutions=0) -> ErrorCounts:
    return ErrorCounts(20, words, insertions, deletions, substitutions, 5 * words, 0)


def validation(epoch=5, counts=None, loops=0, train=None, **sums) -> Validation:
    return Validation(epoch, counts or errors(), loops, ProbeSums(**sums), train or {})


def transcripts(frames_per_token: float, count=200, vocabulary=50):
    draw = np.random.default_rng(0)
    shares = 1 / np.arange(1, vocabulary + 1)
    shares /= shares.sum()
    for _ in range(count):
        tokens = draw.choice(vocabulary, p=shares, size=int(draw.integers(5, 30)))
        yield math.ceil(len(tokens) * frames_per_token), tokens


@pytest.mark.parametrize("frames_per_token", [1.5, 4.0, 12.0])
def test_the_baseline_is_the_loss_of_a_head_that_ignores_the_audio(frames_per_token) -> None:
    every = [
        (frames, tokens)
        for frames, tokens in transcripts(frames_per_token)
        if frames >= len(tokens) + (tokens[1:] == tokens[:-1]).sum()
    ]
    found = CTCBaseline.from_transcripts(every)
    counts = np.bincount(np.concatenate([tokens for _, tokens in every])).astype(float)
    frames, targets = sum(frames for frames, _ in every), sum(len(t) + 1 for _, t in every)
    emitted = counts.sum() / frames
    shares = torch.tensor([*(emitted * counts / counts.sum()), 1 - emitted])
    loss = sum(
        torch.nn.functional.ctc_loss(
            shares.log().expand(count, 1, -1),
            torch.from_numpy(tokens)[None],
            torch.tensor([count]),
            torch.tensor([len(tokens)]),
            blank=len(shares) - 1,
            reduction="sum",
        ).item()
        for count, tokens in every
    )
    assert found.loss == pytest.approx(loss / targets, rel=0.02)
    assert found.frames_per_token == pytest.approx(frames_per_token, rel=0.1)
    assert found.entropy == pytest.approx(-sum(c * math.log(c) for c in counts / counts.sum()))


def test_without_tokens_there_is_no_baseline() -> None:
    assert CTCBaseline.from_transcripts([]) is None
    assert CTCBaseline.from_transcripts([(9, np.zeros(0, np.int32))]) is None


def plateau(baseline: CTCBaseline, less=True) -> CTCPlateau:
    return CTCPlateau(CONFIG, baseline, can_subsample_less=less)


def test_ctc_at_its_plateau_is_named_after_two_epochs() -> None:
    detector = plateau(SHORT)
    assert detector.observe(6.0, 50, 50, 0) is None
    assert detector.observe(4.1, 50, 100, 1) is None
    found = detector.observe(4.0, 50, 150, 2)
    assert "fewer than 1.8 encoder frames" in found.cause
    assert "model.encoder.subsampling=4" in found.remedy
    assert "larger vocabulary" in found.remedy
    assert detector.ctc_vs_blind_baseline == pytest.approx(1.03, abs=0.02)
    assert detector.observe(2.0, 100, 250, 3) is None


def test_the_remedy_depends_on_the_encoder_and_on_the_frames() -> None:
    found = plateau(SHORT, less=False).observe(4.0, 50, 2000, 3)
    assert "subsampling" not in found.remedy
    assert "larger vocabulary" in found.remedy
    found = plateau(LONG).observe(4.0, 50, 2000, 3)
    assert "optimizer.lr" in found.remedy
    assert "ctc_weight" in found.remedy
    assert "vocabulary" not in found.remedy


def test_with_enough_frames_ctc_has_more_steps() -> None:
    assert plateau(LONG).observe(4.0, 50, 999, 30) is None
    assert plateau(LONG).observe(4.0, 50, 1000, 1) is None
    assert plateau(LONG).observe(4.0, 50, 1000, 2) is not None


def test_a_ctc_loss_that_falls_is_no_plateau() -> None:
    detector = plateau(SHORT)
    for number, loss in enumerate([5.0, 4.0, 3.4, 2.6, 1.9]):
        assert detector.observe(loss, 50, 50 * number, number) is None


def test_a_decoder_that_ignores_audio() -> None:
    detector = AudioUse(CONFIG, has_ctc=True)

    def check(own, other, epoch=5):
        sums = {"paired_targets": 10.0, "paired_own": 10 * own, "paired_other": 10 * other}
        return detector.check(validation(epoch, **sums))

    assert "language model" in check(3.2, 3.21).cause
    assert check(3.2, 3.21, epoch=1) is None, "every decoder begins so"
    assert check(3.2, 3.5) is None
    assert check(0.4, 5.0) is None
    assert detector.check(validation()) is None, "without pairs nothing is known"
    assert "ctc_weight" in check(3.2, 3.1).remedy
    without = AudioUse(CONFIG, has_ctc=False).check(
        validation(paired_targets=1.0, paired_own=3.0, paired_other=3.0)
    )
    assert "model.ctc=true" in without.remedy


def rates(detector, values):
    return [
        detector.check(validation(counts=errors(1000, substitutions=round(10 * value))))
        for value in values
    ]


def test_an_error_rate_that_is_stuck() -> None:
    found = rates(StuckErrorRate(CONFIG), [100, 97, 98, 96])
    assert [each is not None for each in found] == [False, False, True, True]
    assert "100, 97, 98 %" in found[2].cause


@pytest.mark.parametrize(
    "values", [[100, 98], [100, 97, 92], [99, 60, 99], [95, 93, 89], [30, 30, 30, 30]]
)
def test_an_error_rate_that_is_not_stuck(values) -> None:
    assert not any(rates(StuckErrorRate(CONFIG), values))


def test_without_reference_words_no_rate_is_stuck() -> None:
    detector = StuckErrorRate(CONFIG)
    assert [detector.check(validation(counts=errors(0))) for _ in range(4)] == [None] * 4


def losses(detector, rows):
    """Validation loss, training loss and word error rate of each validation."""
    return [
        detector.check(
            validation(
                counts=errors(1000, substitutions=round(1000 * rate)),
                targets=10.0,
                own=10 * dev,
                train={"cross_entropy": train, "ctc": 1.0, "transducer": 0.0},
            )
        )
        for dev, train, rate in rows
    ]


def test_overfitting() -> None:
    rows = [(2.0, 2.2, 0.5), (1.5, 1.6, 0.4), (1.6, 1.2, 0.42), (1.7, 1.0, 0.41), (1.8, 0.8, 0.4)]
    found = losses(Overfitting(CONFIG), rows)
    assert [each is not None for each in found] == [False, False, False, False, True]
    assert "1.60 to 0.80" in found[-1].cause
    assert "1.50 to 1.80" in found[-1].cause


@pytest.mark.parametrize(
    "rows",
    [
        [(2.0, 2.2, 0.5), (1.5, 1.6, 0.4), (1.2, 1.2, 0.3), (1.1, 1.0, 0.3), (1.0, 0.8, 0.2)],
        # The loss is overconfident, but the words are still better.
        [(1.5, 1.6, 0.4), (1.6, 1.2, 0.35), (1.7, 1.0, 0.3), (1.8, 0.8, 0.29)],
        # Training does not get better, either: that is a learning rate too high.
        [(1.5, 1.6, 0.4), (1.6, 1.7, 0.5), (1.7, 1.8, 0.5), (1.8, 1.9, 0.6)],
        # Flat.
        [(1.5, 1.6, 0.4), (1.505, 1.2, 0.4), (1.504, 1.1, 0.4), (1.503, 1.0, 0.4)],
    ],
)
def test_no_overfitting(rows) -> None:
    assert not any(losses(Overfitting(CONFIG), rows))


def test_overfitting_needs_both_losses() -> None:
    detector = Overfitting(CONFIG)
    assert detector.check(validation(targets=1.0, own=1.0)) is None
    assert detector.check(validation(train={"cross_entropy": 1.0})) is None


@pytest.mark.parametrize(
    "text",
    [
        "and and and and",
        "he said of the of the of the of the",
        "well a b c d e f a b c d e f a b c d e f a b c d e f then",
        "x" * 16,
        "hm nananananananananana",
        "今日は今日は今日は今日は今日は今日は",
    ],
)
def test_loops_are_found(text) -> None:
    assert is_loop(text)


@pytest.mark.parametrize(
    "text",
    ["", "and and and", "hahaha", "no no no then no", "of the of the of the way", "今日はいい天気"],
)
def test_what_is_no_loop(text) -> None:
    assert not is_loop(text)


def scored(name, reference, hypothesis, duration=1.0) -> ScoredUtterance:
    counted = count_errors(reference, hypothesis)
    return ScoredUtterance(name, "en", reference, hypothesis, duration, counted)


def test_a_loop_that_was_spoken_is_none() -> None:
    loop = "no no no no no"
    assert count_loops([scored("a", loop, loop), scored("b", "yes", loop)]) == 1


def test_repetition_names_an_option_of_decoding() -> None:
    joint, alone = Repetition("attention", has_ctc=True), Repetition("attention", has_ctc=False)
    found = joint.check(validation(loops=2))
    assert "2 of 20" in found.cause
    assert "ctc_weight=0.3" in found.remedy
    assert "no_repeat_ngram=4" in found.remedy
    assert "ctc_weight" not in alone.check(validation(loops=2)).remedy
    assert (
        "no_repeat_ngram" not in Repetition("ctc", has_ctc=True).check(validation(loops=3)).remedy
    )
    assert joint.check(validation(loops=1)) is None
    many = replace(errors(), utterances=1000)
    assert joint.check(validation(counts=many, loops=49)) is None
    assert joint.check(validation(counts=many, loops=50)) is not None


def test_insertions_against_deletions() -> None:
    detector = ErrorBalance("attention", has_ctc=True)
    much = validation(counts=errors(insertions=30, deletions=10))
    assert detector.check(much) is None
    found = detector.check(much)
    assert found.title == "Most errors are insertions"
    assert "ctc_weight" in found.remedy
    assert detector.check(validation(counts=errors(insertions=30, deletions=11))) is None
    little = validation(counts=errors(insertions=2, deletions=15))
    assert [detector.check(little) is None for _ in range(3)] == [True, False, False]
    assert "coverage_penalty" in detector.check(little).remedy
    assert detector.check(validation(counts=errors(deletions=14))) is None
    beginning = validation(counts=errors(deletions=60, substitutions=30))
    assert [detector.check(beginning) for _ in range(3)] == [None] * 3
    assert detector.check(validation(counts=errors(0))) is None


def test_blanks_only() -> None:
    detector = Blanks(CONFIG)
    sums = {"tokens": 30.0, "frames": 100.0, "ctc_frames": 100.0}
    found = detector.check(validation(**sums, ctc_blanks=98.0))
    assert "CTC head" in found.title
    assert detector.check(validation(**sums, ctc_blanks=96.0)) is None
    assert detector.check(validation(epoch=1, **sums, ctc_blanks=100.0)) is None
    sums = {"tokens": 30.0, "frames": 100.0, "transducer_frames": 100.0}
    assert "transducer" in detector.check(validation(**sums, labels=1.0)).title
    assert detector.check(validation(**sums, labels=29.0)) is None
    assert detector.check(validation()) is None


def diagnostics() -> Diagnostics:
    return Diagnostics(CONFIG, "attention", SHORT, has_ctc=True, can_subsample_less=True)


def line(step, ctc, epoch=9):
    return {"step": step, "epoch": epoch, "loss": 1.0, "ctc": ctc, "cross_entropy": 2.0,
            "transducer": 0.0, "guided": 0.0}  # fmt: skip


def test_a_condition_is_reported_once_when_it_begins_and_once_when_it_ends() -> None:
    monitor = diagnostics()
    found = [monitor.observe(line(100 * n, ctc)) for n, ctc in enumerate([4, 4, 4, 1, 1, 4, 4], 1)]
    assert [[change.finding is not None for change in some] for some in found] == [
        [True], [], [], [False], [], [True], []
    ]  # fmt: skip
    assert found[0][0].row()["warning"] == "ctc_plateau"
    assert str(found[0][0]).startswith("warning: CTC has not begun to align.")
    assert str(found[3][0]) == "over: CTC has not begun to align."
    assert monitor.flags()["warning_ctc_plateau"] is True
    assert monitor.flags()["warning_overfitting"] is False


def test_a_line_without_an_update_changes_nothing() -> None:
    monitor = diagnostics()
    monitor.observe(line(100, 4.0))
    before = monitor.state_dict()["parts"]
    assert monitor.observe(line(200, 1.0) | {"loss": None, "ctc": None}) == []
    assert monitor.state_dict()["parts"] == before


def test_blanks_are_no_news_at_the_plateau() -> None:
    probe = ProbeSums(tokens=30.0, frames=100.0, ctc_frames=100.0, ctc_blanks=100.0)
    evaluations = {"dev": Evaluation("none", (scored("a", "a b", "a b"),))}
    names = []
    for ctc in (4.0, 1.0):
        monitor = diagnostics()
        monitor.observe(line(100, ctc))
        names.append([change.name for change in monitor.validated(evaluations, probe, 9)])
    assert names == [[], ["blanks_only"]]


def test_a_restored_monitor_goes_on_as_if_nothing_had_happened() -> None:
    """At every point of a run with several conditions, also across the middle of streaks."""
    draw = np.random.default_rng(1)
    events = []
    for number in range(40):
        if number % 3:
            events.append(line(50 * number + 50, float(draw.uniform(2.5, 5.0))))
        else:
            hypothesis = ["", "a b c d e f g h", "x x x x x", "a b"][int(draw.integers(4))]
            said = tuple(scored(str(n), "a b", hypothesis) for n in range(5))
            probe = ProbeSums(targets=1.0, own=float(draw.uniform(1, 3)))
            events.append(({"dev": Evaluation("none", said)}, probe, 9))

    def play(monitor, some):
        return [
            [str(c) for c in (monitor.observe(e) if isinstance(e, dict) else monitor.validated(*e))]
            for e in some
        ]

    straight = play(diagnostics(), events)
    assert sum(map(len, straight)) > 10
    for cut in range(0, 40, 3):
        first, second = diagnostics(), diagnostics()
        before = play(first, events[:cut])
        second.load_state_dict(first.state_dict())
        assert before + play(second, events[cut:]) == straight


def test_examples_are_the_same_ones_spread_over_sets_and_durations() -> None:
    sets = {
        name: Evaluation(
            "none", tuple(scored(f"{name}{n}", "a", "b", duration=n) for n in draw.permutation(9))
        )
        for name, draw in (("en", np.random.default_rng(0)), ("nl", np.random.default_rng(1)))
    }
    chosen = examples.choose(sets, 3)
    assert {name: [one.id for one in some] for name, some in chosen.items()} == {
        "en": ["en2", "en6"],
        "nl": ["nl4"],
    }
    assert examples.choose({"x": Evaluation("none"), **sets}, 2).keys() == {"en", "nl"}
    assert examples.choose(sets, 0) == {}
    few = {"en": Evaluation("none", (scored("a", "a", "b"),))}
    assert len(examples.choose(few, 2)["en"]) == 1


def test_examples_fit_in_100_columns() -> None:
    from rich.cells import cell_len

    loop = scored("utterance", "今日は" * 30, "of the " * 500)
    shown = list(examples.lines(loop))
    assert max(map(cell_len, shown)) <= 100
    assert len(shown) < 10
    assert shown[-1].endswith("...")
    assert "(empty)" in list(examples.lines(scored("u", "a", "")))[-1]
    assert "".join(line[15:] for line in shown if "今" in line) == "今日は" * 30


@pytest.mark.parametrize(
    ("field", "value"), [("ctc_epochs", 0), ("validations", 1), ("examples", -1)]
)
def test_values_that_make_no_sense_are_refused(field, value) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be at least .* but is {value}"):
        DiagnosticsConfig(**{field: value})
