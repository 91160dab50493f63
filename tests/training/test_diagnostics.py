"""Detectors on figures where they must speak and must not, their probe, and whole runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import soundfile
import torch
from rich.cells import cell_len

from effasr.checkpoint import load_model, resolve
from effasr.data.audio.waveform import load_audio
from effasr.data.collate import Example, collate
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.reader import read
from effasr.data.tokenizer import load_tokenizer
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.evaluation.result import Evaluation, ScoredUtterance
from effasr.evaluation.wer import ErrorCounts, count_errors
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.experts import ExpertsConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.training.config import DiagnosticsConfig
from effasr.training.diagnostics import examples
from effasr.training.diagnostics.monitor import (
    AudioUse,
    Blanks,
    CTCBaseline,
    CTCPlateau,
    Diagnostics,
    ErrorBalance,
    Overfitting,
    Repetition,
    StuckErrorRate,
    Validation,
    is_loop,
)
from effasr.training.diagnostics.probe import Probe, ProbeSums
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.trainer import run
from effasr_kernels import pack

CONFIG = DiagnosticsConfig()
SHORT = CTCBaseline(loss=4.0, entropy=4.1, frames_per_token=1.8)
LONG = replace(SHORT, frames_per_token=4.0)


def errors(words=100, insertions=0, deletions=0, substitutions=0, utterances=20) -> ErrorCounts:
    return ErrorCounts(utterances, words, insertions, deletions, substitutions, 5 * words, 0)


def validation(epoch=5, counts=None, loops=0, train=None, **sums) -> Validation:
    counts = counts or errors()
    return Validation(epoch, counts, counts.utterances, loops, ProbeSums(**sums), train or {})


@pytest.mark.parametrize("frames_per_token", [1.5, 4.0, 12.0])
def test_the_baseline_is_the_loss_of_a_head_that_ignores_the_audio(frames_per_token):
    draw, shares = np.random.default_rng(0), 1 / np.arange(1, 51)
    texts = [
        draw.choice(50, p=shares / shares.sum(), size=draw.integers(5, 30)) for _ in range(200)
    ]
    pairs = [
        (frames, tokens)
        for tokens in texts
        if (frames := math.ceil(len(tokens) * frames_per_token))
        >= len(tokens) + (tokens[1:] == tokens[:-1]).sum()
    ]
    baseline = CTCBaseline.from_transcripts(pairs)
    counts = np.bincount(np.concatenate([tokens for _, tokens in pairs])).astype(float)
    frames, targets = sum(frames for frames, _ in pairs), sum(len(t) + 1 for _, t in pairs)
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
        for count, tokens in pairs
    )
    assert baseline.loss == pytest.approx(loss / targets, rel=0.02)
    assert baseline.frames_per_token == pytest.approx(frames_per_token, rel=0.1)
    assert baseline.entropy == pytest.approx(-sum(c * math.log(c) for c in counts / counts.sum()))
    assert CTCBaseline.from_transcripts([]) is None
    assert CTCBaseline.from_transcripts([(9, np.zeros(0, np.int32))]) is None


@pytest.mark.parametrize(
    ("baseline", "less", "calls", "findings", "words", "absent"),
    [
        # At its plateau it is named after two epochs.
        (SHORT, True, [(6.0, 50, 50, 0), (4.1, 50, 100, 1), (4.0, 50, 150, 2), (2.0, 100, 250, 3)],
         [False, False, True, False],
         ["fewer than 1.8 encoder frames", "encoder.subsampling=4"], "vocabulary"),
        (replace(SHORT, frames_per_token=1.4), False, [(4.0, 50, 2000, 3)], [True],
         ["larger vocabulary"], "subsampling"),
        # Frames of 40 ms need fewer a token.
        (SHORT, False, [(4.0, 50, 2000, 3)], [True], ["1.8 encoder frames", "are enough"], "vocab"),
        (LONG, True, [(4.0, 50, 2000, 3)], [True], ["optimizer.lr", "after_ctc=0.7"], "vocabulary"),
        (replace(LONG, pieces=128), True, [(4.0, 50, 2000, 3)], [True],
         ["with fewer pieces", "--vocab-size 40"], "larger"),
        (replace(LONG, pieces=62), True, [(4.0, 50, 2000, 3)], [True], ["optimizer.lr"], "pieces"),
        # With enough frames it has more steps.
        (LONG, True, [(4.0, 50, 99, 30)], [False], [], ""),
        (LONG, True, [(4.0, 50, 1000, 1)], [False], [], ""),
        (LONG, True, [(4.0, 50, 100, 2)], [True], [], "?"),
        # A loss that falls is no plateau.
        (SHORT, True, [(x, 50, 50 * n, n) for n, x in enumerate([5.0, 4.0, 3.4, 2.6, 1.9])],
         [False] * 5, [], ""),
    ],
)  # fmt: skip
def test_a_ctc_plateau(baseline, less, calls, findings, words, absent):
    detector = CTCPlateau(CONFIG, baseline, can_subsample_less=less, masks_early=True)
    results = [detector.observe(*call) for call in calls]
    assert [result is not None for result in results] == findings
    for text in (str(result) for result in results if result is not None):
        assert all(word in text for word in words)
        assert absent not in text


def paired(own: float, other: float, epoch: int = 5) -> Validation:
    return validation(epoch, paired_targets=10.0, paired_own=10 * own, paired_other=10 * other)


def blanks(**sums) -> Validation:
    return validation(tokens=30.0, frames=100.0, **sums)


def rate(percent: float) -> Validation:
    return validation(counts=errors(1000, substitutions=round(10 * percent)))


def imbalance(**counts) -> Validation:
    return validation(counts=errors(**counts))


def curves(rows: list[tuple[float, float, float]]) -> list[Validation]:
    """Validation loss, training loss and word error rate of each validation."""
    return [
        validation(
            counts=errors(1000, substitutions=round(1000 * rate)),
            targets=10.0,
            own=10 * dev,
            train={"cross_entropy": train, "ctc": 1.0, "transducer": 0.0},
        )
        for dev, train, rate in rows
    ]


def many(loops: int, utterances: int) -> Validation:
    return validation(counts=errors(utterances=utterances), loops=loops)


JOINT, ALONE = {"has_ctc": True}, {"has_ctc": False}
OVERFIT = [(2.0, 2.2, 0.5), (1.5, 1.6, 0.4), (1.6, 1.2, 0.42), (1.7, 1.0, 0.41), (1.8, 0.8, 0.4)]
INSERTED, DELETED = imbalance(insertions=30, deletions=10), imbalance(insertions=2, deletions=15)


@pytest.mark.parametrize(
    ("detector", "validations", "words"),
    [
        # None: no finding at the last validation. Else words of its title, cause and remedy.
        (AudioUse(CONFIG, **JOINT), [paired(3.2, 3.21)], ["language model", "ctc_weight"]),
        (AudioUse(CONFIG, **JOINT), [paired(3.2, 3.1)], ["ctc_weight"]),
        (AudioUse(CONFIG, **ALONE), [paired(3.0, 3.0)], ["model.ctc=true"]),
        # Every decoder begins so.
        (AudioUse(CONFIG, **JOINT), [paired(3.2, 3.21, epoch=1)], None),
        (AudioUse(CONFIG, **JOINT), [paired(3.2, 3.5)], None),
        (AudioUse(CONFIG, **JOINT), [paired(0.4, 5.0)], None),
        (AudioUse(CONFIG, **JOINT), [validation()], None),
        (StuckErrorRate(CONFIG), map(rate, [100, 97]), None),
        (StuckErrorRate(CONFIG), map(rate, [100, 97, 98]), ["100, 97, 98 %"]),
        (StuckErrorRate(CONFIG), map(rate, [100, 97, 92]), None),
        # A warning ends with a rate below, not with the first progress.
        (StuckErrorRate(CONFIG), map(rate, [100, 97, 98, 91]), ["97, 98, 91 %"]),
        (StuckErrorRate(CONFIG), map(rate, [100, 97, 98, 91, 89]), None),
        (StuckErrorRate(CONFIG), map(rate, [95, 93, 89]), None),
        (StuckErrorRate(CONFIG), map(rate, [30, 30, 30, 30]), None),
        # Without reference words there is no rate.
        (StuckErrorRate(CONFIG), [imbalance(words=0)] * 4, None),
        (Overfitting(CONFIG), curves(OVERFIT[:4]), None),
        (Overfitting(CONFIG), curves(OVERFIT), ["1.60 to 0.80", "1.50 to 1.80"]),
        (Overfitting(CONFIG), curves([(2.0, 2.2, 0.5), (1.5, 1.6, 0.4), (1.2, 1.2, 0.3),
                                      (1.1, 1.0, 0.3), (1.0, 0.8, 0.2)]), None),
        # The loss is overconfident, but the words are still better.
        (Overfitting(CONFIG), curves([(1.5, 1.6, 0.4), (1.6, 1.2, 0.35), (1.7, 1.0, 0.3),
                                      (1.8, 0.8, 0.29)]), None),
        # Training does not get better, either: that is a learning rate too high.
        (Overfitting(CONFIG), curves([(1.5, 1.6, 0.4), (1.6, 1.7, 0.5), (1.7, 1.8, 0.5),
                                      (1.8, 1.9, 0.6)]), None),
        # Flat.
        (Overfitting(CONFIG), curves([(1.5, 1.6, 0.4), (1.505, 1.2, 0.4), (1.504, 1.1, 0.4),
                                      (1.503, 1.0, 0.4)]), None),
        # It needs both losses.
        (Overfitting(CONFIG), [validation(targets=1.0, own=1.0)], None),
        (Repetition("attention", **JOINT), [validation(loops=2)],
         ["2 of 20", "ctc_weight=0.3", "no_repeat_ngram=4"]),
        (Repetition("attention", **ALONE), [validation(loops=2)], ["no_repeat_ngram", "!ctc_weig"]),
        (Repetition("ctc", **JOINT), [validation(loops=3)], ["train longer", "!no_repeat_ngram"]),
        (Repetition("attention", **JOINT), [many(49, 1000)], None),
        (Repetition("attention", **JOINT), [many(50, 1000)], []),
        (ErrorBalance("attention", **JOINT), [INSERTED], None),
        (ErrorBalance("attention", **JOINT), [INSERTED] * 2,
         ["Most errors are insertions", "ctc_weight"]),
        (ErrorBalance("attention", **JOINT),
         [INSERTED, INSERTED, imbalance(insertions=30, deletions=11)], None),
        (ErrorBalance("attention", **JOINT), [DELETED] * 2, ["deletions", "coverage_penalty"]),
        (ErrorBalance("attention", **JOINT), [imbalance(deletions=14)] * 3, None),
        # In the beginning.
        (ErrorBalance("attention", **JOINT), [imbalance(deletions=60, substitutions=30)] * 3, None),
        (Blanks(CONFIG), [blanks(ctc_frames=100.0, ctc_blanks=98.0)], ["CTC head"]),
        (Blanks(CONFIG), [blanks(ctc_frames=100.0, ctc_blanks=96.0)], None),
        (Blanks(CONFIG), [blanks(epoch=1, ctc_frames=100.0, ctc_blanks=100.0)], None),
        (Blanks(CONFIG), [blanks(transducer_frames=100.0, labels=1.0)], ["transducer"]),
        (Blanks(CONFIG), [blanks(transducer_frames=100.0, labels=29.0)], None),
        (Blanks(CONFIG), [validation()], None),
    ],
)  # fmt: skip
def test_findings(detector, validations, words):
    for result in validations:
        finding = detector.check(result)
    assert (finding is not None) == (words is not None)
    for word in words or ():
        assert (word.removeprefix("!") in str(finding)) == (not word.startswith("!"))


@pytest.mark.parametrize(
    ("text", "loops"),
    [
        ("and and and and", True),
        ("he said of the of the of the of the", True),
        ("well a b c d e f a b c d e f a b c d e f a b c d e f then", True),
        ("x" * 16, True),
        ("hm nananananananananana", True),
        ("今日は今日は今日は今日は今日は今日は", True),
        *((text, False) for text in ("", "and and and", "hahahaha", "no no no then no")),
        *((text, False) for text in ("of the of the of the way", "今日はいい天気")),
    ],
)
def test_loops(text, loops):
    assert is_loop(text) == loops


def scored(name, reference, hypothesis, duration=1.0) -> ScoredUtterance:
    counted = count_errors(reference, hypothesis)
    return ScoredUtterance(name, "en", reference, hypothesis, duration, counted)


def diagnostics() -> Diagnostics:
    options = {"has_ctc": True, "can_subsample_less": True, "pass_seconds": 500.0}
    return Diagnostics(CONFIG, "attention", SHORT, **options)


def line(step, ctc, epoch=9):
    losses = {"loss": 1.0, "ctc": ctc, "cross_entropy": 2.0, "transducer": 0.0, "guided": 0.0}
    return {"step": step, "epoch": epoch, "audio_seconds": 20.0} | losses


def test_a_condition_is_reported_once_when_it_begins_and_once_when_it_ends():
    monitor = diagnostics()
    # An epoch with copies at other speeds is several passes: the second is that of 1,000 s. Around
    # 90 % of the loss without audio (4.0) nothing ends or begins.
    losses = [4, 4, 3.5, 4, 3.3, 1, 3.5, 4, 4]
    result = [monitor.observe(line(50 * n, ctc, epoch=0)) for n, ctc in enumerate(losses, 1)]
    assert [[change.finding is not None for change in changes] for changes in result] == [
        [True], [], [], [], [], [False], [], [True], []
    ]  # fmt: skip
    assert result[0][0].row()["warning"] == "ctc_plateau"
    assert str(result[0][0]).startswith("warning: CTC has not begun to align.")
    assert str(result[5][0]) == "over: CTC has not begun to align."
    assert monitor.flags()["warning_ctc_plateau"] is True
    assert monitor.flags()["warning_overfitting"] is False
    # A line without an update changes nothing.
    before = monitor.state_dict()["parts"]
    assert monitor.observe(line(800, 1.0) | {"loss": None, "ctc": None}) == []
    assert monitor.state_dict()["parts"] == before


def test_symptoms_are_no_news_at_the_plateau():
    shares = {"ctc_frames": 100.0, "ctc_blanks": 100.0, "paired_own": 9.0, "paired_other": 9.0}
    probe = ProbeSums(tokens=30.0, frames=100.0, paired_targets=9.0, **shares)
    evaluations = {"dev": Evaluation("none", (scored("a", "a b", "a b"),))}
    names = []
    for ctc in (4.0, 1.0):
        monitor = diagnostics()
        monitor.observe(line(100, ctc))
        names.append([change.name for change in monitor.validated(evaluations, probe, 9)])
    assert names == [[], ["blanks_only", "ignores_audio"]]


def test_a_restored_monitor_goes_on_as_if_nothing_had_happened():
    """At every point of a run with several conditions, also across the middle of streaks."""
    draw = np.random.default_rng(1)
    events = []
    for number in range(40):
        if number % 3:
            events.append(line(50 * number + 50, float(draw.uniform(2.5, 5.0))))
        else:
            hypothesis = ["", "a b c d e f g h", "x x x x x", "a b"][int(draw.integers(4))]
            utterances = tuple(scored(str(n), "a b", hypothesis) for n in range(5))
            probe = ProbeSums(targets=1.0, own=float(draw.uniform(1, 3)))
            events.append(({"dev": Evaluation("none", utterances)}, probe, 9))

    def play(monitor, part):
        return [
            [str(c) for c in (monitor.observe(e) if isinstance(e, dict) else monitor.validated(*e))]
            for e in part
        ]

    straight = play(diagnostics(), events)
    assert sum(map(len, straight)) > 10
    for cut in range(0, 40, 3):
        first, second = diagnostics(), diagnostics()
        before = play(first, events[:cut])
        second.load_state_dict(first.state_dict())
        assert before + play(second, events[cut:]) == straight


def test_examples_are_the_same_ones_spread_over_sets_and_durations():
    sets = {
        name: Evaluation(
            "none",
            tuple(
                scored(f"{name}{n}", "a", "b", duration=n)
                for n in np.random.default_rng(seed).permutation(9)
            ),
        )
        for seed, name in enumerate(("en", "nl"))
    }
    chosen = examples.choose(sets, 3)
    assert {name: [row.id for row in rows] for name, rows in chosen.items()} == {
        "en": ["en2", "en6"],
        "nl": ["nl4"],
    }
    assert examples.choose(sets, 0) == {}


def test_examples_fit_in_100_columns():
    lines = list(examples.lines(scored("utterance", "今日は" * 30, "of the " * 500)))
    assert max(map(cell_len, lines)) <= 100
    assert len(lines) < 10
    assert lines[-1].endswith("...")
    assert "(empty)" in list(examples.lines(scored("u", "a", "")))[-1]
    assert "".join(line[15:] for line in lines if "今" in line) == "今日は" * 30


@pytest.mark.parametrize(
    ("field", "value"), [("ctc_epochs", 0), ("validations", 1), ("examples", -1)]
)
def test_error_messages(field, value):
    with pytest.raises(ValueError, match=f"`{field}` must be at least .* but is {value}"):
        DiagnosticsConfig(**{field: value})


EAGER = DiagnosticsConfig(ctc_epochs=1, ctc_steps=0, validations=2)


@pytest.fixture(scope="module")
def noise(tones, tmp_path_factory):
    """The texts of the tones, to audio that has nothing to do with them."""
    folder = tmp_path_factory.mktemp("noise")
    draw = np.random.default_rng(0)
    for name in ("train", "test"):
        lines = [json.loads(line) for line in (tones / f"{name}.jsonl").read_text().splitlines()]
        for line in lines:
            audio = 0.1 * draw.normal(size=round(line["duration"] * 16_000))
            soundfile.write(folder / line["audio_filepath"], audio.astype(np.float32), 16_000)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def test_a_run_on_audio_without_speech_warns(make_config, noise, tmp_path, capsys):
    config = make_config(
        data={"train": str(noise / "train.jsonl"), "validation": str(noise / "test.jsonl")},
        training={
            "max_steps": 24, "log_every": 4, "validate_every": 8, "ema_decay": None,
            "diagnostics": EAGER, "tensorboard": True,
        },
        optimizer=OptimizerConfig(lr=3e-3),
    )  # fmt: skip
    assert run(config) == 0
    folder = tmp_path / "run"
    warned = read_lines(folder / "warnings.jsonl")
    # The error rate is stuck, too, but of the plateau nobody needs to hear twice.
    assert {x["warning"] for x in warned} == {"ctc_plateau", "ignores_audio"}
    assert len({(x["warning"], x["step"]) for x in warned}) == len(warned)
    begun = [x["warning"] for x in warned if x["active"]]
    assert begun.count("ctc_plateau") == begun.count("ignores_audio") == 1
    assert all(x["cause"] and x["remedy"] for x in warned if x["active"])
    visible = capsys.readouterr().err
    joined = " ".join(visible.split())
    for x in warned:
        assert x["title"] in joined
        assert not x["active"] or (x["cause"] in joined and x["remedy"] in joined)
    warnings = visible[visible.index("warning: ") :].splitlines()
    folded = [line for line in warnings if "RTFx" not in line and not line.startswith("next: ")]
    assert max(map(len, folded)) <= 100
    metrics = read_lines(folder / "metrics.jsonl")
    begins = next(x["step"] for x in warned if x["warning"] == "ctc_plateau")
    assert [line["warning_ctc_plateau"] for line in metrics] == [
        line["step"] >= begins for line in metrics
    ]
    assert metrics[-1]["ctc_of_no_audio"] > 0.9
    (first, *_, last) = read_lines(folder / "validation.jsonl")
    assert [x["id"] for x in first["examples"]] == [x["id"] for x in last["examples"]]
    assert len(last["examples"]) == 2
    assert last["examples"][0]["reference"] in visible
    # The probe reads all six, and the validation loss is a mean per token.
    assert last["cross_entropy"] == pytest.approx(metrics[-1]["cross_entropy"], rel=0.3)
    assert last["cross_entropy_other_audio"] - last["cross_entropy"] == pytest.approx(
        last["audio_gain"]
    )
    assert abs(last["audio_gain"]) < 0.05 * last["cross_entropy"]
    assert 0 <= last["ctc_blank_share"] <= 1
    assert any((folder / "tensorboard").iterdir())


@pytest.mark.extended
def test_diagnostics_change_nothing(make_config, tones, tmp_path):
    loop = {"validate_every": 3, "max_steps": 12, "log_every": 2}
    for name, settings in (("with", EAGER), ("without", None)):
        training = loop | {"diagnostics": settings}
        data = {"validation": str(tones / "test.jsonl")}
        assert run(make_config(name=name, data=data, training=training)) == 0
    warned, silent = (read_lines(tmp_path / x / "warnings.jsonl") for x in ("with", "without"))
    assert warned
    assert silent == []
    lines, plain = (read_lines(tmp_path / x / "metrics.jsonl") for x in ("with", "without"))
    assert any(line[key] is True for line in lines for key in line if key.startswith("warning_"))
    assert not any(key.startswith("warning_") for line in plain for key in line)
    assert [line["loss"] for line in plain] == [line["loss"] for line in lines]
    assert "audio_gain" not in read_lines(tmp_path / "without" / "validation.jsonl")[0]
    first, other = (
        load_model(resolve(tmp_path / name)).model.state_dict() for name in ("with", "without")
    )
    assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.fixture
def cuts(tones):
    return sorted(read(tones / "test.jsonl"), key=lambda cut: -cut.duration)


@pytest.fixture
def tokenizer(tones):
    return load_tokenizer(tones / "tokenizer")


def make_model(tokenizer, **options) -> ASRModel:
    config = ModelConfig(
        **{
            "encoder": FastConformerConfig(
                width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4,
                residual_dropout=0.5, conv_norm="layer_norm",
            ),
            "decoder": DecoderConfig(width=16, layers=1, heads=2, feed_forward=16),
            "ctc": True,
            "transducer": TransducerConfig(width=8, joint=8),
            **options,
        },
    )  # fmt: skip
    torch.manual_seed(1)
    model = ASRModel(config, tokenizer.vocab_size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(2.0)
    return model


def batch_alone(cut, tokenizer):
    prompt = prompt_of(cut)
    text = tokenizer.encode(cut.supervisions[0].text, prompt.target)
    example = Example(cut.id, load_audio(cut), tokenizer.prompt(prompt), text)
    return collate([example], eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)


@torch.no_grad()
def expected_sums(model, tokenizer, cuts, groups) -> ProbeSums:
    """Each utterance alone; with other audio that of the next one in its group."""
    model.eval()
    sums, batches = ProbeSums(), [batch_alone(cut, tokenizer) for cut in cuts]
    encoded = [model.encode(batch) for batch in batches]
    for group in groups:
        for position, index in enumerate(group):
            batch, local = batches[index], encoded[index]
            losses = model(batch)
            frames, targets = batch.frame_lengths[0], float(batch.num_targets)
            best = model.ctc_logits(local.values).argmax(-1)
            message = transducer_greedy(model.transducer, local, 10)
            sums += ProbeSums(
                targets=targets,
                own=float(losses.cross_entropy),
                ctc_targets=targets,
                ctc_loss=float(losses.ctc),
                ctc_frames=frames,
                ctc_blanks=float((best == tokenizer.vocab_size).sum()),
                transducer_targets=targets,
                transducer_loss=float(losses.transducer),
                transducer_frames=frames,
                labels=len(message[0]),
                tokens=targets - 1,
                frames=frames,
            )
            if len(group) < 2:
                continue
            other = encoded[group[(position + 1) % len(group)]]
            hidden, _ = model.decode(batch.tokens, pack([other.unpack()[0]]))
            counted = batch.targets >= 0
            scores = model.logits(hidden[counted]).log_softmax(-1)
            sums += ProbeSums(
                paired_targets=targets,
                paired_own=float(losses.cross_entropy),
                paired_other=-float(scores.gather(1, batch.targets[counted, None]).sum()),
            )
    return sums


@pytest.mark.parametrize(
    ("count", "budget", "groups"),
    [
        (32, 10_000, [[0, 1, 2, 3, 4, 5]]),
        (32, 1, [[n] for n in range(6)]),
        # Fewer utterances are spread over the set.
        (2, 500, [[0, 3]]),
    ],
)
def test_sums_are_those_of_each_utterance(cuts, tokenizer, count, budget, groups):
    model = make_model(tokenizer)
    probe = Probe(cuts, model, tokenizer, count=count, frame_budget=budget)
    model.train()
    state = torch.get_rng_state()
    result = probe()
    assert torch.equal(torch.get_rng_state(), state), "a resumed run draws the same"
    assert all(module.training for module in model.modules())
    requested = expected_sums(model, tokenizer, cuts, groups)
    for name in ProbeSums.__slots__:
        assert getattr(result, name) == pytest.approx(getattr(requested, name), rel=1e-4), name
    if budget > 1:
        assert abs(result.other_audio - result.own_audio) > 1e-3, "the test needs a difference"
        assert result.summary()["audio_gain"] == result.other_audio - result.own_audio
    else:
        assert result.own_audio is None
        assert "audio_gain" not in result.summary()
    assert probe() == result


def test_without_a_decoder_or_a_head_nothing_is_claimed_of_it(cuts, tokenizer):
    heads = {"decoder": "cross_entropy", "ctc": "ctc", "transducer": "transducer"}
    for selected, field in heads.items():
        options = {"decoder": None, "ctc": False, "transducer": None}
        del options[selected]
        model = make_model(tokenizer, **options)
        result = Probe(cuts, model, tokenizer, count=32, frame_budget=500)()
        assert {name for name in heads.values() if name in result.summary()} == {field}
        assert (result.ctc_blank_share is None) == (selected != "ctc")
        assert (result.transducer_blank_share is None) == (selected != "transducer")


def test_what_cannot_be_used_is_left_out(cuts, tokenizer):
    model = make_model(
        tokenizer, decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16,
                                         max_positions=8)
    )  # fmt: skip
    fitting = [cut for cut in cuts if batch_alone(cut, tokenizer).num_tokens <= 8]
    assert 0 < len(fitting) < len(cuts), "the test needs texts that are too long"
    result = Probe(cuts, model, tokenizer, count=32, frame_budget=500)()
    assert result.targets == sum(batch_alone(cut, tokenizer).num_targets for cut in fitting)
    cuts[0].recording.sources[0].source = "/nowhere.wav"
    assert Probe(cuts[:1], model, tokenizer, count=32, frame_budget=500)() == ProbeSums()
    assert Probe([], model, tokenizer, count=32, frame_budget=500)() == ProbeSums()


def test_a_request_without_an_expert_is_left_out(cuts, tokenizer):
    def measure(*languages: str) -> ProbeSums:
        experts = ExpertsConfig(count=len(languages), route="language", names=languages)
        encoder = replace(make_model(tokenizer).config.encoder, experts=experts)
        model = make_model(tokenizer, encoder=encoder)
        return Probe(cuts[1:], model, tokenizer, count=32, frame_budget=500)()

    assert measure("xx") == ProbeSums()
    assert measure("xx", "en") != ProbeSums()
