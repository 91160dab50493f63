"""Whisper's tokens: prompts, languages, and text without what is no text."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from effasr.data.manifest.prepare import prepare
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import UnknownLanguageError, WhisperTokenizer, load_tokenizer
from tests.interop.whisper import SPECIALS, make_tokenizer, transformers

TEXTS = ("low middle high", "Grüße, 世界! 😀", "  spaced  out ", "")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def names(tokenizer: WhisperTokenizer, prompt: Prompt) -> list[str]:
    existing = {index: token for token, index in tokenizer.specials.items()}
    return [existing[index] for index in tokenizer.prompt(prompt)]


def test_prompts_and_languages(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, WhisperTokenizer)
    assert tokenizer.languages == tokenizer.sources == ("de", "en", "yue")
    start, task, end = "<|startoftranscript|>", "<|transcribe|>", "<|notimestamps|>"
    assert names(tokenizer, Prompt("yue", "yue")) == [start, "<|yue|>", task, end]
    translation = Prompt("de", "en", "translate")
    assert names(tokenizer, translation) == [start, "<|de|>", "<|translate|>", end]
    assert tokenizer.pad_id == tokenizer.eos_id == tokenizer.specials["<|endoftext|>"]
    with pytest.raises(UnknownLanguageError, match="`target` must be en for a translation"):
        tokenizer.prompt(Prompt("en", "de", "translate"))
    with pytest.raises(UnknownLanguageError, match="must be one of de, en, yue, but is 'fr'"):
        tokenizer.encode("bonjour", "fr")


@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(text: str, folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text, "en")
    assert tokenizer.decode(ids) == text.strip()
    assert tokenizer.count_unknown(ids) == 0
    around = [*tokenizer.prompt(Prompt()), *ids, tokenizer.specials["<|0.24|>"], tokenizer.eos_id]
    assert tokenizer.decode(around) == text.strip()
    theirs = transformers.WhisperTokenizer.from_pretrained(folder)
    # What a pre-trained model writes begins with a space, but not where words have none between.
    spaced = f" {text.strip()}" if text.strip() else ""
    assert ids == theirs(spaced, add_special_tokens=False).input_ids
    assert tokenizer.encode(text, "yue") == theirs(text.strip(), add_special_tokens=False).input_ids


def test_english_only_models_have_no_languages(tmp_path: Path) -> None:
    few = tuple(name for name in SPECIALS if len(name) > len("<|yue|>"))
    make_tokenizer(few).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.languages == ("en",)
    assert names(tokenizer, Prompt()) == ["<|startoftranscript|>", "<|notimestamps|>"]
    assert tokenizer.generation(Prompt())["is_multilingual"] is False
    with pytest.raises(UnknownLanguageError, match="must be one of en, but is 'de'"):
        tokenizer.prompt(Prompt("de", "de"))


def test_what_lacks_a_prompt_token_or_is_too_large_is_refused(tmp_path: Path) -> None:
    lacking = tuple(name for name in SPECIALS if name != "<|translate|>")
    make_tokenizer(lacking).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"lacks <\|translate\|>"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "vocab.json").write_text("{}")
        (tmp_path / "merges.txt").write_text("")
        os.truncate(tmp_path / name, (64 << 20) + 1)
        with pytest.raises(ValueError, match=f"{name} must have at most 67108864 bytes"):
            load_tokenizer(tmp_path)


def test_a_vocabulary_and_its_merges_are_as_good(folder: Path, tmp_path: Path) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    parts, copy = tmp_path / "parts", tmp_path / "copy"
    parts.mkdir()
    (parts / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    (parts / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    added = {token["content"]: token["id"] for token in whole["added_tokens"]}
    (parts / "added_tokens.json").write_text(json.dumps(added))
    tokenizer, read = load_tokenizer(folder), load_tokenizer(parts)
    assert isinstance(read, WhisperTokenizer)
    read.save(copy)
    for other in (read, load_tokenizer(copy)):
        assert other.specials == tokenizer.specials
        assert other.vocab_size == tokenizer.vocab_size
        for text in TEXTS:
            assert other.encode(text, "en") == tokenizer.encode(text, "en")
            assert other.decode(other.encode(text, "en")) == text.strip()
    (parts / "added_tokens.json").write_text(json.dumps({**added, "<|en|>": 9999}))
    with pytest.raises(ValueError, match=r"the id of <\|\w+\|> must be \d+, the next one"):
        load_tokenizer(parts)


def test_many_tokens_a_second_are_no_reason_to_drop(folder: Path, tmp_path: Path) -> None:
    """Bytes of some scripts are more than 12.5 tokens a second, which CTC could not write."""
    wav, manifest = tmp_path / "one.wav", tmp_path / "manifest.jsonl"
    soundfile.write(wav, np.random.default_rng(0).standard_normal(16_000) * 0.1, 16_000)
    line = {"audio_filepath": str(wav), "duration": 1.0, "text": "ありがとう", "lang": "yue"}
    manifest.write_text(json.dumps(line) + "\n")
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode(line["text"], "yue")) > 12.5
    report = prepare(manifest, tmp_path / "out", tokenizer=tokenizer, language="yue")
    assert (report.kept.utterances, report.dropped.utterances) == (1, 0)
