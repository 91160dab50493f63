import pytest

from effasr.data.audio.augmentation.clips import Clips
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.reader import read
from effasr.data.prompt import Prompt


def write_kaldi(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_", ".")).write_text(content)
    return folder


def test_kaldi_folder(tmp_path, write_tone):
    write_tone(tmp_path / "rec.wav", 2.0)
    folder = write_kaldi(
        tmp_path,
        wav_scp="rec rec.wav\n",
        text="u1 one two\nu2\tdrei\n",
        segments="u1 rec 0.5 1.25\nu2 rec 1.5 -1\n",
        utt2spk="u1 anna\nu2 ben\n",
        utt2lang="u2 de\n",
    )
    first, second = read(folder)
    assert (first.id, first.start, first.duration) == ("u1", 0.5, 0.75)
    assert (second.id, second.start, second.duration) == ("u2", 1.5, 0.5)
    assert [cut.supervisions[0].text for cut in (first, second)] == ["one two", "drei"]
    assert first.supervisions[0].speaker == "anna"
    assert (prompt_of(first).source, prompt_of(second).source) == ("en", "de")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"wav_scp": "u sph2pipe -f wav u.sph |\n"}, r"wav\.scp:1: recording 'u' is a command"),
        ({"wav_scp": "u raw.ark:17\n"}, r"wav\.scp:1: recording 'u' lies in an archive"),
        ({"wav_scp": "u\n"}, r"wav\.scp:1: recording 'u' has no path"),
        ({"wav_scp": "u u.wav\nu u.wav\n"}, r"wav\.scp:2: 'u' appears twice"),
        ({"text": "v one\n"}, r"text:1: utterance 'v' is not in wav\.scp: run utils/fix_data"),
        ({"segments": "v u 0 1\n"}, "text:1: utterance 'u' is not in segments"),
        ({"segments": "u u 0\n"}, "segments:1: must be `utterance recording start end`"),
        ({"segments": "u w 0 1\n"}, r"segments:1: recording 'w' is not in wav\.scp"),
        ({"segments": "u u 1 0.5\n"}, r"segments:1: `end` must exceed `start`.*0\.5, 1\.0"),
        ({"segments": "u u 0 x\n"}, "segments:1: times must be numbers of seconds, .*'x'"),
    ],
)
def test_malformed_kaldi_folders(tmp_path, files, message, write_tone):
    write_tone(tmp_path / "u.wav", 1.0)
    folder = write_kaldi(tmp_path, **({"wav_scp": "u u.wav\n", "text": "u one\n"} | files))
    with pytest.raises(ValueError, match=message):
        read(folder)


def test_a_kaldi_folder_needs_transcripts(tmp_path):
    with pytest.raises(ValueError, match="there is no `text`"):
        read(write_kaldi(tmp_path, wav_scp="u u.wav\n"))


def test_audio_with_text_beside_it(tmp_path, write_tone):
    for name in ("b/two.flac", "a/one.wav"):
        path = write_tone(tmp_path / name, 0.5)
        path.with_suffix(".txt").write_text(f" {path.stem}\nmore \n")
    first, second = read(tmp_path, language="de")
    assert [cut.id for cut in (first, second)] == ["one", "two"]
    assert first.supervisions[0].text == "one more"
    assert prompt_of(first).source == "de"


def test_linked_folders_are_entered_once(tmp_path, write_tone):
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for path in (corpus / "b/one.wav", elsewhere / "two.wav", corpus / ".hidden/three.wav"):
        write_tone(path, 0.5).with_suffix(".txt").write_text(path.stem)
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "a").symlink_to(corpus / "b")
    (corpus / "loop").symlink_to(corpus)
    found = read(corpus)
    assert [cut.recording.sources[0].source for cut in found] == [
        str(corpus / "b/one.wav"),
        str(corpus / "linked/two.wav"),
    ]
    assert len(Clips.load([corpus], "noise").samples) == 2


def test_transcripts_of_librispeech_in_a_linked_folder(tmp_path, write_tone):
    write_tone(tmp_path / "elsewhere/1-2-0000.flac", 0.5)
    (tmp_path / "elsewhere/1-2.trans.txt").write_text("1-2-0000 ONE\n")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/1").symlink_to(tmp_path / "elsewhere")
    assert [cut.id for cut in read(tmp_path / "corpus")] == ["1-2-0000"]


def test_audio_without_text_beside_it_is_named(tmp_path, write_tone):
    write_tone(tmp_path / "a.wav", 0.5).with_suffix(".txt").write_text("one")
    write_tone(tmp_path / "b.wav", 0.5)
    with pytest.raises(ValueError, match=r"b\.wav: there is no b\.txt .*1 of 2 audio files"):
        read(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.md").write_text("nothing")
    with pytest.raises(ValueError, match="not a folder of utterances"):
        read(tmp_path)


@pytest.mark.parametrize("field", ["text", "transcription", "sentence"])
def test_hugging_face_audio_folder(tmp_path, field, write_tone):
    write_tone(tmp_path / "clips/a.wav", 0.5)
    (tmp_path / "metadata.csv").write_text(
        f'file_name,{field},lang\nclips/a.wav,"one, two",de\n', encoding="utf-8-sig"
    )
    (cut,) = read(tmp_path)
    assert cut.supervisions[0].text == "one, two"
    assert prompt_of(cut).source == "de"


def test_an_empty_cell_of_a_table_is_a_missing_field(tmp_path, write_tone):
    write_tone(tmp_path / "a.wav", 0.5)
    (tmp_path / "metadata.csv").write_text("file_name,text,lang,task,pnc\na.wav,one,,,\n")
    assert prompt_of(read(tmp_path)[0]) == Prompt()


def test_hugging_face_audio_folder_in_json(tmp_path, write_tone, write_lines):
    write_tone(tmp_path / "a.wav", 0.5)
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": "a.wav", "transcription": "one"}])
    assert read(tmp_path)[0].supervisions[0].text == "one"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file_name,words\na.wav,one\n", r"metadata\.csv: row 1: `text` is missing"),
        ("name,text\na.wav,one\n", r"metadata\.csv: row 1: `file_name` is missing"),
        ("file_name,text\na.wav,one,two\n", "row 1: must have 2 columns"),
        ("file_name,text\na.wav,one\nb.wav\n", "row 2: must have 2 columns"),
    ],
)
def test_malformed_tables(tmp_path, content, message, write_tone):
    write_tone(tmp_path / "a.wav", 0.5)
    (tmp_path / "metadata.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_librispeech(tmp_path, write_tone):
    write_tone(tmp_path / "61/70968/61-70968-0000.flac", 0.5)
    (tmp_path / "61/70968/61-70968.trans.txt").write_text("61-70968-0000 HE BEGAN A CONFUSED\n")
    (cut,) = read(tmp_path)
    assert (cut.id, cut.supervisions[0].text) == ("61-70968-0000", "HE BEGAN A CONFUSED")
