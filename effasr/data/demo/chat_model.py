"""Conversations of the demo corpus, and the folder of a small chat model without weights."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from effasr.data.atomic_files import write_atomically
from effasr.data.manifest.lines import numbered_lines, parse_object

TRANSCRIBE = "Transcribe the speech."
"""The instruction of transcription, `effasr.decoding.config.DecodingConfig.instruction`."""

_TRANSLATE = "Translate the speech to {language}."
_SAY, _REPEAT = "Say something.", "Repeat: {text}"
_LANGUAGES = {"en": "English", "de": "German"}
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIALS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
_VOCABULARY = 512
_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, slots=True)
class DemoConversations:
    """Files that `write_conversations` wrote."""

    speech: Path  # Spoken conversations to train on
    dev: Path  # The same of the development split
    text: Path  # Written conversations to train on
    text_dev: Path  # The same of the development split
    model: Path  # Folder of the chat model: ``config.json`` and tokenizer, without weights


def write_conversations(root: Path) -> DemoConversations:
    """Write conversations about the recordings and the texts of a demo corpus, and a chat model.

    Spoken ones ask for the transcript or the translation. Written ones ask to say something, or to
    repeat a text.
    """
    files = DemoConversations(
        speech=root / "speech.jsonl",
        dev=root / "speech_dev.jsonl",
        text=root / "text.jsonl",
        text_dev=root / "text_dev.jsonl",
        model=root / "chat_model",
    )
    for split, speech, text in (
        ("train", files.speech, files.text),
        ("dev", files.dev, files.text_dev),
    ):
        path = root / f"{split}.jsonl"
        rows = [parse_object(line, f"{path}:{n}") for n, line in numbered_lines(path)]
        _write(speech, map(_spoken, rows))
        _write(text, _written(rows))
        if split == "train":
            _write_model(files.model, [str(row["text"]) for row in rows])
    return files


def _spoken(row: dict[str, Any]) -> dict[str, Any]:
    instruction = TRANSCRIBE
    if row["task"] == "translate":
        instruction = _TRANSLATE.format(language=_LANGUAGES[row["target_lang"]])
    audio = {"type": "audio", "audio": row["audio_filepath"]}
    requested = [audio, {"type": "text", "text": instruction}]
    return _conversation(row["id"], requested, row["text"])


def _written(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        text = row["text"]
        yield _conversation(f"{row['id']}-say", _SAY, text)
        yield _conversation(f"{row['id']}-repeat", _REPEAT.format(text=text), text)


def _conversation(name: str, asked: Any, answer: str) -> dict[str, Any]:
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"id": name, "messages": turns}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomically(path, lines.encode())


def _write_model(folder: Path, texts: list[str]) -> None:
    """Train a tokenizer, and write the configuration of a two-layer Llama."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError(
            "the conversations of the demo need the package `tokenizers`: "
            "pip install effasr[huggingface]."
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIALS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(_SPECIALS),
        show_progress=False,
    )
    instructions = [TRANSCRIBE, _SAY, _REPEAT, *(_TRANSLATE.format(language="English"),)]
    tokenizer.train_from_iterator([*texts, *instructions * 50], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {name: tokenizer.token_to_id(name) for name in _SPECIALS}
    settings = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "chat_template": _TEMPLATE}
    config = {
        **_CONFIG,
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_token_id": None,
        "eos_token_id": ids["<|end|>"],
        "pad_token_id": ids["<|pad|>"],
    }
    for name, content in (("tokenizer_config.json", settings), ("config.json", config)):
        write_atomically(folder / name, (json.dumps(content, indent=2) + "\n").encode())
