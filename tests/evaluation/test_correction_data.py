"""Text pairs from n-best lists, as training reads them."""

import json

import numpy as np
import soundfile

from effasr.data.manifest.pairs import is_text_only, pairs
from effasr.transcription.results import Alternative, Segment, Transcription
from effasr.transcription.second_pass.corrector import joined_texts
from tests.support.recognition import write_set


def test_texts_of_a_list_are_different_and_in_its_order():
    def segment(*texts: str) -> Segment:
        listed = tuple(Alternative(text, -n, -n) for n, text in enumerate(texts))
        return Segment(0.0, 1.0, texts[0], alternatives=listed)

    item = Transcription("u", 1.0, "b", (segment("b", "a  c", "b", "", "a c"),))
    assert joined_texts(item.alternatives) == "b | a c"
    two = Transcription("u", 2.0, "b x", (segment("b", "a"), segment("x", "y")))
    assert joined_texts(two.alternatives).split(" | ")[0] == "b x"
    assert joined_texts(Transcription("u", 1.0, "", (segment("", ""),)).alternatives) == ""


def test_the_command_writes_a_manifest_of_text_pairs(effasr, tmp_path, saved, noise):
    references = ["One, two.", "three four", "five"]
    sounds = [noise(0.8 + 0.5 * number, seed=number) for number in range(3)]
    manifest, out = write_set(tmp_path, sounds, references), tmp_path / "new" / "pairs.jsonl"
    common = ("--device", "cpu", "--method", "ctc", "--beam", "4", "--nbest", "3")
    command = ("make-correction-data", saved, manifest, out, *common)
    assert "3 pairs in" in effasr(*command, "--source", "ours").out
    assert is_text_only(out)
    result = {item.id: item for item in pairs(out)}
    assert [result[f"u{n}"].text for n in range(3)] == references
    assert {item.source_name for item in result.values()} == {"ours"}
    assert {item.prompt.task for item in result.values()} == {"transcribe"}

    waves = [tmp_path / f"u{n}.wav" for n in range(3)]
    listed = effasr("transcribe", "--run", saved, *common, "--json", *waves).rows
    for row, name in zip(listed, result, strict=True):
        texts = [item["text"] for item in row["segments"][0]["alternatives"]]
        assert result[name].source == " | ".join(dict.fromkeys(text for text in texts if text))

    (tmp_path / "broken.wav").write_bytes(b"no audio")
    soundfile.write(tmp_path / "s.wav", np.zeros(16_000, np.float32), 16_000)
    before = out.read_bytes()
    for file in ("broken.wav", "s.wav"):
        row = {"audio_filepath": file, "text": "a", "id": "bad", "duration": 1.0}
        manifest.write_text(json.dumps(row) + "\n")
        refused = effasr(*command).error
        assert "none of its 1 utterances gives a pair; the first, bad" in refused
        assert out.read_bytes() == before
