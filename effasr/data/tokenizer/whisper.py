"""Tokenizers of Whisper models: byte-level BPE, languages, tasks and timestamps."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effasr.data.languages import UnknownLanguageError, language_among
from effasr.data.prompt import WITHOUT_SPACES, Prompt
from effasr.data.tokenizer.base import TimestampTokens
from effasr.data.tokenizer.hugging_face import TIMESTAMP, HuggingFaceTokenizer

_START, _EOS, _NOTIMESTAMPS = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"
_TASKS = {"transcribe": "<|transcribe|>", "translate": "<|translate|>"}
_PREVIOUS, _NO_SPEECH = "<|startofprev|>", ("<|nospeech|>", "<|nocaptions|>")
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_GPT2_EOS = 50_256
_TRANSLATION = "en"


class WhisperTokenizer(HuggingFaceTokenizer):
    """One that has Whisper's prompt tokens.

    A prompt is ``<|startoftranscript|> <|language|> <|transcribe|> <|notimestamps|>``, with
    ``<|translate|>`` for a translation, which is into English. An English-only model reads
    ``<|startoftranscript|> <|notimestamps|>``. Texts begin with a space where a language has spaces
    between words, as what pre-trained models write does.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        vocabulary = self._vocabulary
        missing = [name for name in (_START, _EOS, _NOTIMESTAMPS) if name not in vocabulary]
        result = (_LANGUAGE.fullmatch(token) for token in vocabulary)
        languages = tuple(sorted(match[1] for match in result if match))
        # English-only models have GPT-2's own vocabulary, and the others' languages to no purpose.
        self.is_multilingual = bool(languages) and vocabulary.get(_EOS) != _GPT2_EOS
        if self.is_multilingual:
            missing += [name for name in _TASKS.values() if name not in vocabulary]
        if missing:
            raise ValueError(
                f"{self._path}: must have the prompt tokens of Whisper, but lacks "
                f"{', '.join(missing)}."
            )
        self.sources = self.languages = languages if self.is_multilingual else (_TRANSLATION,)
        self.pad_id = self.eos_id = vocabulary[_EOS]
        timestamps = {
            token: index for token, index in vocabulary.items() if TIMESTAMP.fullmatch(token)
        }
        self.specials = {**self.specials, **timestamps}
        no_speech = (vocabulary[name] for name in _NO_SPEECH if name in vocabulary)
        self.timestamps = TimestampTokens(
            start=vocabulary[_START],
            without=vocabulary[_NOTIMESTAMPS],
            first=vocabulary[_NOTIMESTAMPS] + 1,
            previous=vocabulary.get(_PREVIOUS),
            no_speech=next(no_speech, None),
            count=len(timestamps) or 1501,
        )

    def encode(self, text: str, language: str) -> list[int]:
        language = language_among(language, self.languages, "text")
        words = text.strip()
        spaced = words and language not in WITHOUT_SPACES
        return super().encode(f" {words}" if spaced else words, language)

    def prompt(self, prompt: Prompt) -> list[int]:
        """There is no token for punctuation."""
        source, _ = self.prompt_languages(prompt)
        names = [_START, _NOTIMESTAMPS]
        if self.is_multilingual:
            if prompt.task == "translate" and prompt.target != _TRANSLATION:
                raise UnknownLanguageError(
                    f"`target` must be {_TRANSLATION} for a translation by Whisper, which knows no "
                    f"other, but is {prompt.target!r}."
                )
            names[1:1] = [f"<|{source}|>", _TASKS[prompt.task]]
        return [self._vocabulary[name] for name in names]

    def trained_prompt(self, generation: Mapping[str, Any]) -> Prompt:
        """Return the prompt that settings of ``generate`` ask for, those of older versions too."""
        names = {token: name for name, token in self._vocabulary.items()}
        forced = generation.get("forced_decoder_ids")
        pairs = [pair for pair in forced or () if isinstance(pair, list) and len(pair) == 2]
        tokens = [names.get(token, "") for _, token in pairs if isinstance(token, int)]
        language, task = generation.get("language"), generation.get("task")
        if not isinstance(language, str):
            language = next((name for name in tokens if _LANGUAGE.fullmatch(name)), None)
        if not isinstance(task, str):
            task = next((name for name in _TASKS if _TASKS[name] in tokens), None)
        if not self.is_multilingual or language is None:
            return Prompt()
        source = language_among(language, self.sources, "speech")
        translates = task == "translate" and source != _TRANSLATION
        return Prompt().stating(source, _TRANSLATION if translates else source)

    def language_tokens(self) -> tuple[int, list[int]]:
        """Return the token after which a model writes the language it hears, and those of all."""
        names = [_START, *(f"<|{language}|>" for language in self.sources)]
        start, *languages = (self._vocabulary[name] for name in names)
        return start, languages

    def generation(self, prompt: Prompt) -> dict[str, Any]:
        """Return the settings of transformers' ``generate`` for these tokens."""
        vocabulary = self._vocabulary
        facts: dict[str, Any] = {
            "is_multilingual": self.is_multilingual,
            "no_timestamps_token_id": vocabulary[_NOTIMESTAMPS],
        }
        if _PREVIOUS in vocabulary:
            facts["prev_sot_token_id"] = vocabulary[_PREVIOUS]
        if self.is_multilingual:
            tags = [f"<|{language}|>" for language in self.languages]
            facts["lang_to_id"] = {tag: vocabulary[tag] for tag in tags}
            facts["task_to_id"] = {task: vocabulary[name] for task, name in _TASKS.items()}
            facts["language"], facts["task"] = self.prompt_languages(prompt)[0], prompt.task
        return facts


def is_whisper(vocabulary: Mapping[str, int]) -> bool:
    """Return whether these are the tokens of a Whisper model."""
    return _START in vocabulary and _NOTIMESTAMPS in vocabulary
