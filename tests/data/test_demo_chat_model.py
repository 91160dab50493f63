import json

import pytest

from effasr.data.conversation.messages import conversations
from effasr.data.conversation.tokenize import conversation_rows
from effasr.data.demo.chat_model import TRANSCRIBE, write_conversations
from effasr.data.tokenizer import ChatTokenizer, load_tokenizer
from effasr.decoding.config import DecodingConfig

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("demo")
    for split, count in (("train", 6), ("dev", 2)):
        rows = [
            {
                "id": f"{split}-{n}-{task}",
                "audio_filepath": f"{split}/{n}.wav",
                "text": f"turn on lamp {n}",
                "target_lang": "en",
                "task": task,
            }
            for n in range(count)
            for task in ("transcribe", "translate")
        ]
        (root / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_conversations(root)


def test_conversations_ask_for_what_the_corpus_has(files):
    spoken = list(conversations(files.speech))
    assert len(spoken) == 12
    assert not any(item.problem for item in spoken)
    instructions = [item.messages[0].parts[1] for item in spoken[:2]]
    assert instructions == [TRANSCRIBE, "Translate the speech to English."]
    assert instructions[0] == DecodingConfig().instruction
    assert spoken[0].clips[0].audio == str(files.speech.parent / "train/0.wav")
    written = list(conversations(files.text_dev))
    assert len(written) == 8
    assert not any(item.clips for item in written)


def test_the_chat_model_tokenizes_them(files):
    tokenizer = load_tokenizer(files.model)
    assert isinstance(tokenizer, ChatTokenizer)
    config = json.loads((files.model / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.vocab_size
    assert config["eos_token_id"] == tokenizer.eos_id == tokenizer.stop_ids[0]
    for item in (*conversations(files.speech), *conversations(files.text)):
        rows = conversation_rows(item.messages, tokenizer)
        assert ~rows[-1] == tokenizer.eos_id
