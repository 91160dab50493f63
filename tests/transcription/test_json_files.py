import json
import math

import pytest

from effasr.transcription.json_files import write_json, write_json_lines


def test_a_failed_write_keeps_what_was_there(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    write_json_lines(path, [{"n": 1}])
    with pytest.raises(TypeError):
        write_json_lines(path, [{"n": 2}, {"text": object()}])
    assert path.read_text() == '{"n": 1}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.jsonl"]


def test_json_is_strict_and_keeps_letters(tmp_path) -> None:
    write_json_lines(tmp_path / "rows", [{"text": "наука"}, {"text": "b"}])
    lines = (tmp_path / "rows").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["наука", "b"]
    assert "наука" in lines[0]
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "rate", {"wer": math.nan})
