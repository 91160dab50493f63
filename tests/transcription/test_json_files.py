import json
import math

import pytest

from effasr.transcription.json_files import one_line, write_json, write_json_lines


def test_makes_the_folder_and_leaves_nothing_else(tmp_path) -> None:
    write_json(tmp_path / "a" / "b" / "rate", {"wer": 0.5})
    assert json.loads((tmp_path / "a" / "b" / "rate").read_text()) == {"wer": 0.5}
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["rate"]


def test_a_failed_write_keeps_what_was_there(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write_json_lines(path, [{"n": 1}])
    with pytest.raises(TypeError):
        write_json_lines(path, [{"n": 2}, {"text": object()}])
    assert path.read_text() == '{"n": 1}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_names_that_are_not_text(tmp_path) -> None:
    name = "a\udcff\n\t\x1b[31mü b"
    write_json_lines(tmp_path / "rows", [{"id": name}])
    write_json(tmp_path / "row", {"id": name})
    for path in (tmp_path / "rows", tmp_path / "row"):
        assert json.loads(path.read_text(encoding="utf-8")) == {"id": name}
    assert one_line(name) == r"a\udcff\n\t\x1b[31mü b"


def test_json_is_strict_and_keeps_letters(tmp_path) -> None:
    write_json_lines(tmp_path / "rows", [{"text": "наука"}, {"text": "b"}])
    lines = (tmp_path / "rows").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["наука", "b"]
    assert "наука" in lines[0]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "rate", {"wer": math.nan})
