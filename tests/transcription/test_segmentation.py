"""Utterances of long recordings: their ends, what is left out, and damaged inputs."""

import json
import string
import sys

import numpy as np
import pytest
import soundfile
import torch

from effasr import checkpoint
from effasr.data.manifest.reader import read
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import CharacterTokenizer
from effasr.evaluation.normalizer import basic
from effasr.transcription.inputs.chunking import Chunk
from effasr.transcription.segmentation import Segmenter, transcripts
from tests.support.corpora import read_lines
from tests.support.recognition import make_model

RATE, FRAME = 16_000, 0.04
SENTENCES = [
    ["one", "two", "three", "four"],
    ["five", "six", "seven", "eight"],
    ["nine", "one", "four", "two"],
    ["three", "six", "nine", "five"],
]


class Reader:
    """Hears what was said, with a frame for each token, in chunks of one sentence."""

    sample_rate, frame_seconds = RATE, FRAME

    def __init__(self, tokenizer, sentences, pause=1.0):
        self.chunks, self.truth, at = [], [], 0.0
        random = np.random.default_rng(0)
        for words in sentences:
            tokens = tokenizer.encode(" ".join(words), "en")
            scores = torch.full((12 * len(tokens) + 20, tokenizer.vocab_size + 1), -12.0)
            scores[:, -1] = 0.0
            for number, token in enumerate(tokens):
                scores[12 + 12 * number, -1], scores[12 + 12 * number, token] = -9.0, 0.0
            samples = np.zeros(round(len(scores) * FRAME * RATE), np.float32)
            begin, end = round(10 * FRAME * RATE), round((len(scores) - 10) * FRAME * RATE)
            samples[begin:end] = 0.1 * random.standard_normal(end - begin)
            first = round(at * RATE)
            self.chunks.append((Chunk(first, first + len(samples)), samples, scores))
            self.truth.append(((first + begin) / RATE, (first + end) / RATE))
            at += len(samples) / RATE + pause

    def ctc_scores(self, request):
        yield from self.chunks

    def waveform(self):
        samples = np.zeros(self.chunks[-1][0].end, np.float32)
        for chunk, part, _ in self.chunks:
            samples[chunk.start : chunk.end] = part
        return samples


@pytest.fixture
def letters(tmp_path):
    pieces = ["<pad>", "|", "<unk>", *string.ascii_lowercase]
    (tmp_path / "vocab.json").write_text(json.dumps({x: n for n, x in enumerate(pieces)}))
    return CharacterTokenizer(tmp_path)


@pytest.fixture
def segment(tokenizer, tmp_path):
    """Writes a talk with a text, and returns its segments and the true times of sentences."""

    def run(
        text,
        sentences=SENTENCES,
        suffix=".txt",
        longest=20.0,
        as_manifest=False,
        tokenizer=tokenizer,
        language="en",
    ):
        reader = Reader(tokenizer, sentences)
        soundfile.write(tmp_path / "talk.wav", reader.waveform(), RATE)
        source = tmp_path / "talk.wav"
        if as_manifest:
            row = {"audio_filepath": str(source), "text": text, "id": "talk"}
            source = tmp_path / "talks.jsonl"
            source.write_text(json.dumps(row))
        else:
            source.with_suffix(suffix).write_text(text)
        segmenter = Segmenter(reader, tokenizer, basic, punctuation=False, longest=longest)
        (transcript,) = transcripts(source, Prompt(language, language))
        return segmenter.segments(transcript), reader.truth

    return run


def text_of(sentences=SENTENCES):
    return " ".join(" ".join(words).capitalize() + "." for words in sentences)


def cues(sentences=SENTENCES):
    times = "00:00:0{}.000 --> 00:00:0{}.900"
    rows = [f"{times.format(n, n)}\n{' '.join(w)}\n" for n, w in enumerate(sentences)]
    return "WEBVTT\n\n" + "\n".join(rows)


HEADING = "Chapter 12\n\n" + text_of(SENTENCES[:2]) + "\n\n[ 27 ]\n\n" + text_of(SENTENCES[2:])


@pytest.mark.parametrize(
    ("text", "options", "reasons"),
    [
        (text_of(), {}, []),
        (text_of(), {"as_manifest": True}, []),
        ("\n".join(" ".join(words) for words in SENTENCES), {}, []),
        (cues(), {"suffix": ".vtt"}, []),
        # The first and the last words of sentences are wrong or missing.
        (text_of().replace("Five six", "Two six").replace("four two.", "four."), {}, []),
        (HEADING, {}, ["not_spoken"] * 2),
        (text_of([*SENTENCES[:2], SENTENCES[3]]), {}, ["no_text"]),
    ],
    ids=["txt", "manifest", "lines", "subtitles", "wrong words", "extra text", "missing text"],
)
def test_ends_are_those_of_the_sentences(segment, text, options, reasons) -> None:
    rows, truth = segment(text, **options)
    kept = [row for row in rows if "reason" not in row]
    assert [row["reason"] for row in rows if "reason" in row] == reasons
    if reasons == ["no_text"]:
        del truth[2]
    assert len(kept) == len(truth)
    for row, (start, end) in zip(kept, truth, strict=True):
        # 0.1 s of background stay at both ends.
        assert row["offset"] == pytest.approx(start - 0.1, abs=0.06)
        assert row["offset"] + row["duration"] == pytest.approx(end + 0.1, abs=0.06)
    if text == text_of():
        assert " ".join(row["text"] for row in kept) == text
    for row in kept if text == text_of() else ():
        times = [0, *(x for word in row["words"] for x in (word["start"], word["end"]))]
        assert " ".join(word["word"] for word in row["words"]) == row["text"]
        assert [*times, row["duration"]] == sorted([*times, row["duration"]])


@pytest.mark.parametrize("shift", [-0.3, 0.0, 0.8, 60.0])
@pytest.mark.parametrize("spoken", [1, 2])
def test_times_of_subtitles_choose_between_repetitions(segment, tokenizer, spoken, shift) -> None:
    """The second sentence is said three times, of which the subtitles have one."""
    sentences = [SENTENCES[0], *[SENTENCES[1]] * 3, SENTENCES[2]]
    truth = Reader(tokenizer, sentences).truth
    cues = [truth[number] for number in (0, 1 + spoken, 4)]
    times = [f"00:{(t + shift) // 60:02.0f}:{(t + shift) % 60:06.3f}" for cue in cues for t in cue]
    text = "\n".join(
        f"{a} --> {b}\n{' '.join(words)}\n"
        for a, b, words in zip(times[::2], times[1::2], SENTENCES, strict=False)
    )
    rows, _ = segment(text, sentences, ".srt")
    kept = [row for row in rows if "reason" not in row]
    assert len(kept) == 3
    heard = [row["offset"] + 0.1 for row in kept]
    if shift < 60:
        assert heard == pytest.approx([start for start, _ in cues], abs=0.06)
    # Times that are wrong altogether do not keep the text from being aligned.
    assert [heard[0], heard[2]] == pytest.approx([cues[0][0], cues[2][0]], abs=0.06)


@pytest.mark.parametrize(
    ("language", "spoken", "written"),
    [
        (
            "en",
            "In nineteen ninety-five. About twenty %. Or zero one.",
            "In 1995. About 20 %. Or 01.",
        ),
        ("en", "six thousand. Is three point five. At ten thirty.", "6,000. Is 3.5. At 10:30."),
        ("nl", "In negentien honderd tien. zesduizend. drie komma zes.", "In 1910. 6.000. 3,6."),
        ("nl", "De tweede. Om tien dertig. nul zes.", "De 2e. Om 10:30. 06."),
    ],
)
def test_numbers_are_aligned_as_words(segment, letters, language, spoken, written) -> None:
    pytest.importorskip("num2words")
    sentences = [basic(words).split() for words in spoken.strip(".").split(".")]
    words, _ = segment(spoken, sentences, tokenizer=letters, language=language)
    rows, _ = segment(written, sentences, tokenizer=letters, language=language)
    assert " ".join(row["text"] for row in rows) == written
    for name in ("offset", "duration", "confidence"):
        assert [row[name] for row in rows] == [row[name] for row in words]


@pytest.mark.parametrize("language", ["en", "yo"])
def test_numbers_that_cannot_be_spelled(segment, letters, language, monkeypatch, caplog) -> None:
    if language == "en":
        monkeypatch.setitem(sys.modules, "num2words", None)
    else:
        pytest.importorskip("num2words")
    text = text_of().replace("six", "6").replace("One two", "One 2")
    words, _ = segment(text_of(), tokenizer=letters, language=language)
    rows, _ = segment(text, tokenizer=letters, language=language)
    assert " ".join(row["text"] for row in rows) == text
    assert [row["offset"] for row in rows] == [row["offset"] for row in words]
    remedy = "`pip install num2words`" if language == "en" else "lacks the language yo"
    assert [remedy in message for message in caplog.messages] == [True]


def test_scores_tell_right_from_wrong(segment) -> None:
    right, _ = segment(text_of())
    wrong, _ = segment(text_of(SENTENCES[::-1]))
    kept = [row["confidence"] for row in wrong if "reason" not in row]
    assert min(row["confidence"] for row in right) > 0.9
    assert sum(score > 0.05 for score in kept) <= 1


def test_long_sentences_are_cut_at_their_pauses(segment) -> None:
    rows, truth = segment(" ".join(map(" ".join, SENTENCES)), longest=4.0)
    assert len(rows) == len(truth)


@pytest.mark.parametrize(
    ("text", "details"),
    [("", "the text must have words that the tokenizer knows"), ("one " * 500, "most of the text")],
    ids=["empty", "longer than the audio"],
)
def test_texts_that_cannot_be_aligned(effasr, saved, tmp_path, noise, text, details) -> None:
    soundfile.write(tmp_path / "talk.wav", noise(3.0), RATE)
    (tmp_path / "talk.txt").write_text(text)
    outcome = effasr("segment", saved, tmp_path / "talk.wav", tmp_path / "out")
    assert outcome.code == 2
    assert "no utterance is left" in outcome.err
    assert details in read_lines(tmp_path / "out" / "dropped.jsonl")[0]["details"]


def test_a_folder_is_segmented_once_and_read_by_training(effasr, saved, tmp_path, noise) -> None:
    audio, out = tmp_path / "audio", tmp_path / "out"
    audio.mkdir()
    for number in range(2):
        soundfile.write(audio / f"r{number}.wav", noise(4.0, seed=number), RATE)
        (audio / f"r{number}.txt").write_text("One two three.\n\nFour five.\n")
    (audio / "r2.wav").write_bytes(b"no audio")
    (audio / "r2.txt").write_text("One.")
    arguments = "segment", saved, audio, out, "--min-score", "0"
    assert effasr(*arguments).code == 1
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    assert "r0: done before" in effasr(*arguments).err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
    rows = read_lines(out / "manifest.jsonl")
    assert [cut.supervisions[0].text for cut in read(out / "manifest.jsonl")] == [
        row["text"] for row in rows
    ]
    report = json.loads(files["report.json"])
    assert report["by_reason"]["failed"]["utterances"] == 1
    assert report["dropped"]["utterances"] == len(read_lines(out / "dropped.jsonl"))
    # The threshold alone changes without another alignment.
    assert effasr(*arguments[:-1], "1").code == 2


def test_a_model_without_ctc_is_refused(effasr, tokenizer, tmp_path, model) -> None:
    other = make_model(tokenizer.vocab_size, decoder=model.config.decoder)
    checkpoint.save_model(tmp_path / "model", other, tokenizer)
    outcome = effasr("segment", tmp_path / "model", tmp_path, tmp_path / "out")
    assert outcome.code == 2
    assert "`RUN` must have a CTC head" in outcome.err
