import gzip
import os
from pathlib import Path

import numpy as np
import pytest
from lhotse import AudioSource, CutSet, MonoCut, MultiCut, Recording
from lhotse.cut import Cut

from effasr.data.audio.embedded import TarMember
from effasr.data.audio.waveform import AudioSegment, audio_path, load_audio
from effasr.data.index.columns import AudioColumnsBuilder
from effasr.data.manifest.cuts import audio_of, prompt_of
from effasr.data.manifest.reader import deciding_files, read
from effasr.data.manifest.row import absolute
from effasr.data.prompt import Prompt
from tests.support.corpora import write_lines, write_tone

DE_EN = Prompt("de", "en", "translate", True)


@pytest.fixture
def line(tmp_path):
    """Makes a manifest of one line about a second of audio, with fields put in or left out."""
    write_tone(tmp_path / "a.wav", 1.0)

    def make(**fields):
        row = {"audio_filepath": "a.wav", "duration": 1.0, "text": "one two"} | fields
        selected = {name: value for name, value in row.items() if value is not ...}
        return write_lines(tmp_path / "m.jsonl", [selected])

    return make


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Prompt("en", "en", "transcribe", True)),
        ({"lang": "de"}, Prompt("de", "de", "transcribe", True)),
        ({"source_lang": "de", "target_lang": "en"}, DE_EN),
        ({"source_lang": "de", "lang": "en"}, DE_EN),
        ({"src_lang": "de", "tgt_lang": "en"}, DE_EN),
        ({"src_lang": "de", "language_id": "en", "target_lang": None}, DE_EN),
        ({"language_id": "de", "tgt_lang": "en", "src_lang": ""}, DE_EN),
        ({"source_lang": "de", "src_lang": "fr", "target_lang": "en", "tgt_lang": "de"}, DE_EN),
        ({"lang": "de", "target_lang": "en", "task": "ast"}, DE_EN),
        ({"lang": "de", "taskname": "s2t_translation", "target_lang": "en"}, DE_EN),
        ({"task": "ASR", "pnc": "nopnc"}, Prompt("en", "en", "transcribe", False)),
        ({"pnc": "yes"}, Prompt()),
        ({"pnc": False}, Prompt(punctuation=False)),
    ],
)
def test_prompt_fields(line, fields, expected):
    (cut,) = read(line(**fields))
    assert prompt_of(cut) == expected
    if fields.keys() <= {"task", "pnc"}:
        assert prompt_of(read(line(**fields), language="fr")[0]).source == "fr"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"audio_filepath": ...}, "neither a NeMo line"),
        ({"audio_filepath": 3}, "`audio_filepath` must be a string, but is 3"),
        ({"text": ...}, "`text` is missing: every line needs it"),
        ({"text": ["a"]}, r"`text` must be a string, but is \['a'\]"),
        ({"duration": "long"}, "`duration` must be a number of seconds, but is 'long'"),
        ({"duration": True}, "`duration` must be a number of seconds, but is True"),
        ({"duration": -1}, "`duration` must be greater than 0, but is -1"),
        ({"duration": 0}, "`duration` must be greater than 0, but is 0"),
        ({"duration": float("nan")}, "`duration` must be a number of seconds, but is nan"),
        ({"offset": -0.5}, r"`offset` must be at least 0, but is -0\.5"),
        ({"lang": 7}, "`lang` must be a string, but is 7"),
        ({"task": "sing"}, "`task` must be one of asr, .*, but is 'sing'"),
        ({"pnc": "maybe"}, "`pnc` must be true, false or one of .*, but is 'maybe'"),
        ({"lang": "de", "target_lang": "en", "task": "asr"}, "use the task 'translate'"),
        ({"task": "translate"}, "use the task 'transcribe'"),
        ({"id": [5]}, r"`id` must be a string, but is \[5\]"),
        ({"audio_filepath": "b.wav"}, "b.wav: there is no such file.*`effasr prepare` leaves"),
        ({"duration": 3.0}, "`duration` is 3 s, but the file holds 1 s"),
        ({"duration": 0.4}, r"`duration` is 0.4 s, but the file holds 1 s \(a part .* `offset`"),
        ({"offset": 2.0}, "`offset` is 2 s, but the file ends at 1 s"),
    ],
)
def test_a_malformed_line_is_named(line, fields, message):
    with pytest.raises(ValueError, match=rf"m\.jsonl:1: .*{message}") as caught:
        read(line(**fields))
    assert str(caught.value).count("m.jsonl:1:") == 1
    assert "neither" in message or "`effasr prepare` leaves such lines out" in str(caught.value)


GOOD = b'{"audio_filepath": "a.wav", "text": "one"}\n'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.jsonl", None, "there is no such file or folder"),
        ("m.jsonl", b"", "holds no utterances"),
        ("m.jsonl", b"\n \n", "holds no utterances"),
        ("m.jsonl", GOOD + b"\n  \n{broken\n", r"m\.jsonl:4: not valid JSON .*column 2"),
        ("m.jsonl", GOOD + b"[1]\n", r"m\.jsonl:2: must be a JSON object, but is a list"),
        ("m.jsonl", GOOD + b"T\xfcr", r"m\.jsonl:2: must be UTF-8, but has the byte 0xfc"),
        ("m.jsonl.gz", gzip.compress(GOOD, mtime=0)[:-9], r"m\.jsonl\.gz: cannot be read"),
    ],
)
def test_a_file_that_is_no_manifest(tmp_path, name, content, message):
    write_tone(tmp_path / "a.wav", 1.0)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / name)


def test_half_a_character_is_no_text(line):
    path = line()
    content = path.read_text()
    for half in (r"\ud800", r"\uDC00"):
        path.write_text(content.replace("one two", f"one {half} two"))
        with pytest.raises(ValueError, match=r"m\.jsonl:1: must be text, but has '\\ud[c8]00'"):
            read(path)
    path.write_text(content.replace("one two", r"\ud83d\ude00 one"))
    (cut,) = read(path)
    assert cut.supervisions[0].text == "\U0001f600 one"


@pytest.mark.timeout(30)
def test_a_pipe_is_refused_as_such(tmp_path):
    os.mkfifo(tmp_path / "m.jsonl")
    for find in (read, deciding_files):
        with pytest.raises(ValueError, match="must be a regular file, but is a pipe"):
            find(tmp_path / "m.jsonl")


def test_durations_become_exact_and_channels_a_mean(line, tmp_path):
    assert read(line(duration=1.04))[0].duration == 1.0
    assert read(line(duration=...))[0].duration == 1.0
    part = read(line(offset=0.25, duration=0.5))[0]
    assert (part.start, part.duration) == (0.25, 0.5)
    assert read(line(offset=0.25, duration=...))[0].duration == 0.75
    write_tone(tmp_path / "a.wav", 0.5, channels=2)
    (cut,) = read(line(duration=...))
    assert cut.channel == [0, 1]
    assert load_audio(cut).shape == (8000,)


@pytest.mark.parametrize(
    ("ids", "names"),
    [
        ([None, None, None], ["a", "a-2", "a-3"]),
        ([None, "a-3", None, None, "a-5", None], ["a", "a-3", "a-2", "a-4", "a-5", "a-6"]),
        (["u", None, "u"], None),
    ],
)
def test_names_made_of_files_are_unique_and_given_ids_must_be(tmp_path, ids, names):
    write_tone(tmp_path / "a.wav", 0.3)
    write_tone(tmp_path / "x/a.wav", 0.3)
    audio = ["a.wav", "x/a.wav"] * 4
    lines = zip(audio, ids, strict=False)
    rows = [{"audio_filepath": file, "text": "t", "id": name} for file, name in lines]
    path = write_lines(tmp_path / "m.jsonl", rows)
    if names is None:
        with pytest.raises(ValueError, match=r"m\.jsonl:3: the id 'u' is taken .*give every"):
            read(path)
    else:
        assert list(read(path).ids) == names


@pytest.mark.parametrize(
    "path",
    ["a", "../a", "./a", "/x/a", "/", "//a", "/x//a", "/x/./a", "/x/.", "/x/../a", "/x/", "/x/.a"],
)
def test_paths_become_absolute_as_pathlib_makes_them(path):
    folder = Path("/corpus/of mine")
    assert absolute(path, folder) == str((folder / path).absolute())


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_lhotse_cuts_come_back(line, tmp_path, suffix):
    cuts = read(line(source_lang="de", target_lang="en", pnc=False))
    cuts.to_file(tmp_path / f"cuts{suffix}")
    again = read(tmp_path / f"cuts{suffix}")
    assert again[0] == cuts[0]
    assert prompt_of(again[0]) == Prompt("de", "en", "translate", False)


def test_plain_lhotse_cuts_get_the_missing_fields(line, tmp_path):
    (cut,) = read(line(lang="de"))
    cut.custom = {"channel_type": "far"}
    cut.recording.sources[0].source = "a.wav"
    CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl")
    (again,) = read(tmp_path / "cuts.jsonl")
    assert again.custom == {"channel_type": "far"}
    assert prompt_of(again) == Prompt("de", "de")
    assert load_audio(again).shape == (16_000,)


def test_cuts_that_cannot_be_used_are_refused(line, tmp_path):
    path = tmp_path / "cuts.jsonl"
    (cut,) = read(line())

    def refused(message, *cuts):
        CutSet.from_cuts(cuts).to_file(path)
        with pytest.raises(ValueError, match=rf"cuts\.jsonl:1: .*{message}"):
            read(path)

    refused("one supervision, but has 0: it has no text, which `eff", cut.drop_supervisions())
    refused("must be a MonoCut or a MultiCut, but is a MixedCut", cut.pad(duration=2.0))
    silent = read(line())[0]
    silent.supervisions[0].text = None
    refused("text` must be a string, but is None", silent)
    path.write_text('{"supervisions": [], "type": "Tape"}\n')
    with pytest.raises(ValueError, match=r"cuts\.jsonl:1: not a cut that lhotse can read"):
        read(path)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("`speaker` of a supervision must be text, but is .'a'.", {"speaker": ["a"]}),
        ("`channel` must be numbers from 0, but is ..", {"type": "MultiCut", "channel": []}),
        ("`channels` of a source must be a list, but is None", {"channels": None}),
    ],
)
def test_cuts_with_wrong_types_are_named(line, message, fields):
    path = line()
    row = read(path)[0].to_dict()
    for part in (row, row["supervisions"][0], row["recording"]["sources"][0]):
        part.update({name: value for name, value in fields.items() if name in part})
    row["supervisions"][0] |= {name: fields[name] for name in fields if name == "speaker"}
    with pytest.raises(ValueError, match=rf"m\.jsonl:1: not a cut .*{message}"):
        read(write_lines(path, [row]))


def cut_of(path, channel, kind="file", channels=3):
    recording = Recording(
        "r", [AudioSource(kind, list(range(channels)), path)], 16_000, 32_000, 2.0,
        channel_ids=list(range(channels)),
    )  # fmt: skip
    cls = MonoCut if isinstance(channel, int) else MultiCut
    return cls(f"cut of {path} {channel}", 0.1 + 0.2, 1 / 3, channel, recording=recording)  # type: ignore[arg-type]


CUTS = {
    "mono": cut_of("/a/b.wav", 0),
    "second channel": cut_of("/a/b.wav", 1),
    "all channels": cut_of("/a/b.wav", [0, 1, 2]),
    "first channels": cut_of("/a/b.wav", [0, 1]),
    "tar member": cut_of(str(TarMember("/a/x y.tar", 1536, 99)), 0, "shar"),
    "resampled, as every file is": cut_of("/a/b.wav", 0).resample(48_000),
    "name in another script": cut_of("/ä/жук.flac", 0),
    "name that is no text": cut_of(os.fsdecode(b"/a/\xff.wav"), 0),
}


@pytest.fixture
def others(tmp_path, write_tone):
    """Cuts whose audio only lhotse can read, or whose channels no column holds."""
    path = write_tone(tmp_path / "a.wav", 0.5, channels=3)
    recording = Recording.from_file(path, recording_id="r")
    plain = recording.to_cut()
    return {
        "odd channels": MultiCut("odd", 0.0, 0.5, [0, 2], recording=recording),
        "transform": plain.with_id("louder").perturb_volume(2.0),
        "speed": plain.with_id(os.fsdecode(b"caf\xe9")).perturb_speed(1.1),
    }


def test_a_row_of_numbers_is_the_segment_of_the_cut():
    builder, second = AudioColumnsBuilder(), AudioColumnsBuilder()
    for number, cut in enumerate(CUTS.values()):
        (builder if number < 3 else second).append(cut)
    builder.extend(second)
    columns = builder.build()
    assert not len(columns.cuts.values)
    for row, cut in enumerate(CUTS.values()):
        assert columns[row] == AudioSegment.of(cut)
        assert columns.name(row) == cut.id
        assert audio_of(columns[row]) == audio_of(cut)
        assert audio_path(columns[row]) == audio_path(cut)


def test_other_cuts_are_kept_as_cuts(others):
    builder = AudioColumnsBuilder()
    builder.append(CUTS["mono"])
    for cut in others.values():
        builder.append(cut)
    columns = builder.build()
    assert columns[0] == AudioSegment.of(CUTS["mono"])
    for row, cut in enumerate(others.values(), 1):
        selected = columns[row]
        assert isinstance(selected, Cut)
        assert columns.name(row) == selected.id == cut.id
        assert audio_of(selected) == audio_of(cut)
        assert np.array_equal(load_audio(selected), load_audio(cut))
