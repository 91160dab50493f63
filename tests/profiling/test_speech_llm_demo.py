"""The study of the demo's speech language models: what it trains on, and what it measures."""

import csv
import json
import math
from pathlib import Path
from typing import ClassVar

import pytest
import speech_llm_demo as study
import torch

from effasr.checkpoint import load_model, save_model
from effasr.config import from_mapping
from effasr.data.conversation.messages import conversations
from effasr.data.conversation.tokenize import conversation_rows
from effasr.data.tokenizer import load_tokenizer
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr_kernels import PackedLayout
from tests.support.chat_folder import write_chat_model
from tests.support.talks import model_mapping, write_talks

pytest.importorskip("transformers")


def _spoken(name, instruction, answer):
    asked = [{"type": "audio", "audio": f"{name}.wav"}, {"type": "text", "text": instruction}]
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return json.dumps({"id": name, "messages": turns}) + "\n"


@pytest.fixture
def corpus(tmp_path):
    lines = [_spoken("a", "Write.", "one"), _spoken("b", "Translate.", "two")]
    lines.append(_spoken("c", "Write.", "three"))
    (tmp_path / "speech_dev.jsonl").write_text("".join(lines))
    return tmp_path


class Recorded:
    """Commands that are noted; each leaves what the next needs."""

    calls: ClassVar[list[tuple[str, ...]]] = []

    def __init__(self, folder: Path, say: object) -> None:
        self.folder = folder

    def call(self, *arguments: str) -> float:
        self.calls.append(arguments)
        given = dict(one.split("=", 1) for one in arguments if "=" in one)
        if arguments[0] == "train":
            Path(given["output"], given["name"]).mkdir(parents=True)
        if arguments[0] == "export":
            Path(arguments[2]).mkdir(parents=True)
            Path(arguments[2], "config.json").write_text("{}")
        if arguments[0] == "evaluate":
            out = Path(arguments[arguments.index("--output") + 1])
            out.mkdir()
            result = {"words": 10, "wer": 0.3, "cer": 0.1, "wer_interval": [0.2, 0.4]}
            (out / "wer.json").write_text(json.dumps(result))
        return 5.0


def test_each_system_is_trained_once_and_has_a_row_for_each_instruction(
    corpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(study, "Commands", Recorded)
    monkeypatch.setattr(Recorded, "calls", [])
    monkeypatch.setattr(study, "text_perplexity", lambda loaded, path: 2.5)
    monkeypatch.setattr("effasr.checkpoint.load_model", lambda path, device: None)
    monkeypatch.setattr("effasr.checkpoint.resolve", lambda path: path)
    arguments = [str(corpus), "--encoder", "E", "--csv", str(tmp_path / "out.csv")]
    arguments += ["--seeds", "0", "--work", str(tmp_path / "work"), "--steps", "7"]
    for _ in range(2):
        assert study.main(arguments) == 0
    trained = [call for call in Recorded.calls if call[0] == "train"]
    assert [call[1] for call in trained] == ["speech_llm_demo_text", *["speech_llm_demo"] * 2]
    _, joint, alone = trained
    assert all("init_from=E" in call and "training.max_steps=7" in call for call in (joint, alone))
    (mixed,) = [one for one in joint if one.startswith("data.mix=")]
    assert "text.jsonl, weight: 0.2" in mixed
    assert "data.mix=null" in alone
    assert not any("text.jsonl" in one for one in alone)
    with (tmp_path / "out.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [(row["system"], row["instruction"], row["utterances"]) for row in found] == [
        ("text", "", ""),
        *((name, *some) for name in study.DATA for some in (("Translate.", "1"), ("Write.", "2"))),
    ]
    assert {row["text_perplexity"] for row in found} == {"2.5"}


def test_what_was_trained_for_other_updates_is_refused(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "Commands", Recorded)
    monkeypatch.setattr(Recorded, "calls", [])
    monkeypatch.setattr(study, "text_perplexity", lambda loaded, path: 2.5)
    monkeypatch.setattr("effasr.checkpoint.load_model", lambda path, device: None)
    monkeypatch.setattr("effasr.checkpoint.resolve", lambda path: path)
    arguments = [str(corpus), "--encoder", "E", "--csv", str(tmp_path / "out.csv")]
    arguments += ["--seeds", "0", "--work", str(tmp_path / "work"), "--only", "joint"]
    for _ in range(2):
        assert study.main([*arguments, "--steps", "7"]) == 0
    assert "joint, seed 0, 7 updates: skipped" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"same settings, .*'steps': 8.* but .*'steps': 7"):
        study.main([*arguments, "--steps", "8"])


def test_other_conversations_have_no_instruction(tmp_path):
    _, text = write_talks(tmp_path)
    with pytest.raises(ValueError, match="must have a recording, an instruction and an answer"):
        study.by_instruction(text)


def test_perplexity_is_that_of_the_answers(tmp_path):
    speech, text = write_talks(tmp_path / "data", texts=5)
    write_chat_model(tmp_path / "llm")
    tokenizer = load_tokenizer(tmp_path / "llm")
    mapping = model_mapping(tmp_path / "llm")
    settings = mapping["language_model"]
    settings["architecture"] = (tmp_path / "llm/config.json").read_text()
    torch.manual_seed(0)
    save_model(tmp_path / "m", ASRModel(from_mapping(ModelConfig, mapping), 320), tokenizer)
    loaded = load_model(tmp_path / "m")
    nats, count = 0.0, 0
    model = loaded.model.language_model
    with torch.no_grad():
        for one in conversations(text):
            rows = torch.from_numpy(conversation_rows(one.messages, tokenizer)).long()
            tokens = torch.where(rows < 0, ~rows, rows)
            hidden = model(model.embed_tokens(tokens), PackedLayout.from_lengths([len(tokens)]))
            log_probs = model.logits(hidden).log_softmax(1)
            written = (rows < 0).nonzero()[:, 0]
            nats -= float(log_probs[written - 1, tokens[written]].sum())
            count += len(written)
    assert study.text_perplexity(loaded, text) == pytest.approx(math.exp(nats / count), rel=1e-4)
    with pytest.raises(ValueError, match="must be written, but has speech"):
        study.text_perplexity(loaded, speech)
