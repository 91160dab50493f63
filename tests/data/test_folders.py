import pytest

from effasr.data.audio.augmentation.augmenter import Clips
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.reader import read
from tests.support.corpora import write_tone


def write(folder, files):
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


KALDI = {"wav.scp": "u u.wav\n", "text": "u one\n"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (KALDI | {"wav.scp": "u sph2pipe u.sph |\n"}, r"wav\.scp:1: recording 'u' is a command"),
        (KALDI | {"wav.scp": "u raw.ark:17\n"}, r"wav\.scp:1: recording 'u' lies in an archive"),
        (KALDI | {"wav.scp": "u\n"}, r"wav\.scp:1: recording 'u' has no path"),
        (KALDI | {"wav.scp": "u u.wav\nu u.wav\n"}, r"wav\.scp:2: 'u' appears twice"),
        (KALDI | {"text": "v one\n"}, r"text:1: utterance 'v' is not in wav\.scp: run utils/fix_"),
        (KALDI | {"segments": "v u 0 1\n"}, "text:1: utterance 'u' is not in segments"),
        (KALDI | {"segments": "u u 0\n"}, "segments:1: must be `utterance recording start end`"),
        (KALDI | {"segments": "u w 0 1\n"}, r"segments:1: recording 'w' is not in wav\.scp"),
        (KALDI | {"segments": "u u 1 0.5\n"}, r"segments:1: `end` must exceed .*0\.5, 1\.0"),
        (KALDI | {"segments": "u u 0 x\n"}, "segments:1: times must be numbers of seconds, .*'x'"),
        ({"wav.scp": "u u.wav\n"}, "there is no `text`"),
        ({"v.wav": "", "v.txt": ""}, r"u\.wav: there is no u\.txt beside it"),
        ({"metadata.csv": "file_name,words\na.wav,one\n"}, r"metadata\.csv:2: `text` is missing"),
        ({"metadata.csv": "name,text\na.wav,one\n"}, r"csv: the first line must name the columns"),
        ({"metadata.csv": "file_name,text\nu.wav,one\nb.wav\n"}, r"csv:3: has 1 columns"),
        ({"notes.md": "nothing"}, "not a folder of utterances"),
    ],
)
def test_malformed_folders(tmp_path, files, message):
    if "notes.md" not in files:
        write_tone(tmp_path / "u.wav", 1.0)
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path, files))


def test_kaldi_folder(tmp_path):
    write_tone(tmp_path / "rec.wav", 2.0)
    files = {
        "wav.scp": "rec rec.wav\n",
        "text": "u1 one two\nu2\tdrei\n",
        "segments": "u1 rec 0.5 1.25\nu2 rec 1.5 -1\n",
        "utt2spk": "u1 anna\nu2 ben\n",
        "utt2lang": "u2 de\n",
    }
    folder = write(tmp_path, files)
    first, second = read(folder)
    assert (first.id, first.start, first.duration) == ("u1", 0.5, 0.75)
    assert (second.id, second.start, second.duration) == ("u2", 1.5, 0.5)
    assert [cut.supervisions[0].text for cut in (first, second)] == ["one two", "drei"]
    assert first.supervisions[0].speaker == "anna"
    assert (prompt_of(first).source, prompt_of(second).source) == ("en", "de")


def test_linked_folders_are_entered_once(tmp_path):
    corpus, elsewhere = tmp_path / "corpus", tmp_path / "elsewhere"
    for path in (corpus / "b/one.wav", elsewhere / "two.wav", corpus / ".hidden/three.wav"):
        write_tone(path, 0.5).with_suffix(".txt").write_text(path.stem)
    (corpus / "linked").symlink_to(elsewhere)
    (corpus / "a").symlink_to(corpus / "b")
    (corpus / "loop").symlink_to(corpus)
    result = read(corpus)
    assert [cut.recording.sources[0].source for cut in result] == [
        str(corpus / "b/one.wav"),
        str(corpus / "linked/two.wav"),
    ]
    assert len(Clips.load([corpus], "noise").samples) == 2
