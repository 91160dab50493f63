"""Tokenizers of Hugging Face's models: of Canary and Parakeet, of wav2vec 2.0, and of Whisper."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from effasr.data.languages import UnknownLanguageError, language_among
from effasr.data.prompt import WITHOUT_SPACES, Prompt
from effasr.data.tokenizer.base import TimestampTokens, Tokenizer, check_ids, frame_numbers
from effasr.untrusted.documents import read_json_object
from effasr.untrusted.files import DOCUMENT_BYTES, open_regular, read_bytes, read_text

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
VOCABULARY_FILE, MERGES_FILE, ADDED_FILE = "vocab.json", "merges.txt", "added_tokens.json"
"""Files of older checkpoints instead of ``tokenizer.json``."""

TIMESTAMP = re.compile(r"<\|\d+\.\d\d\|>")
"""A token of Whisper's for a time."""

_COMPANIONS = (
    SETTINGS_FILE,
    "special_tokens_map.json",
    ADDED_FILE,
    VOCABULARY_FILE,
    MERGES_FILE,
    "normalizer.json",
)
_LANGUAGE = re.compile(r"<\|([a-z]{2})\|>")
_PAD, _EOS, _UNKNOWN, _BLANK = "<pad>", "<|endoftext|>", "<unk>", "<blank>"
_PROMPT_HEAD = ("<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>")
_PROMPT_TAIL = ("<|noitn|>", "<|notimestamp|>", "<|nodiarize|>")
_SENTENCE = ("<s>", "</s>")
_PUNCTUATION = ("<|nopnc|>", "<|pnc|>")
_SPACE, _COHERE = "▁", "CohereAsrProcessor"


class HuggingFaceTokenizer(Tokenizer):
    """A ``tokenizer.json``; what its prompts are, a subclass says."""

    companions: tuple[str, ...] = _COMPANIONS  # Other files of the folder that `save` writes

    def __init__(self, directory: str | Path) -> None:
        self._path = Path(directory) / TOKENIZER_FILE
        self._tokenizer = read_tokenizer_json(self._path)
        # Kept, because a run that was resumed removes the checkpoint that it read them from.
        self._files = {
            name: read_bytes(self._path.with_name(name))
            for name in (TOKENIZER_FILE, *self.companions)
            if self._path.with_name(name).is_file()
        }
        self._vocabulary: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        # Ids may have holes: the model's output has a class for each number up to the largest.
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: index for index, token in added.items() if token.special}

    def encode(self, text: str, language: str) -> list[int]:
        """One vocabulary serves all languages."""
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except BaseException as error:
            raise _unreadable(self._path, error) from error

    def decode(self, ids: Iterable[int]) -> str:
        """Times are skipped, too."""
        # A tokenizer need not list a Whisper's times.
        plain = ids if self.timestamps is None else self.timestamps.plain(ids)
        checked = check_ids(plain, self.vocab_size)
        try:
            return self._tokenizer.decode(checked, skip_special_tokens=True).strip()
        except BaseException as error:
            raise _unreadable(self._path, error) from error

    def count_unknown(self, ids: Iterable[int]) -> int:
        unknown = self._vocabulary.get(_UNKNOWN)
        return sum(token == unknown for token in ids)

    def pieces(self) -> list[str]:
        """Byte-level pieces have the letters of GPT-2 for their bytes."""
        names = {number: piece.replace("Ġ", "▁") for piece, number in self._vocabulary.items()}
        return [names.get(number, f"<{number}>") for number in range(self.vocab_size)]

    def save(self, directory: str | Path) -> None:
        """Write ``tokenizer.json`` and the files that belong to it, as they were read."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() == self._path.parent.resolve():
            return
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        if TOKENIZER_FILE not in self._files:
            # Its `save` raises bare exceptions where a disk is full.
            (folder / TOKENIZER_FILE).write_text(self._tokenizer.to_str(pretty=True), "utf-8")


class CanaryTokenizer(HuggingFaceTokenizer):
    """One that has canary-1b-v2's prompt tokens.

    A prompt is ``<|startofcontext|> <|startoftranscript|> <|emo:undefined|> <|source|>
    <|target|> <|pnc|> <|noitn|> <|notimestamp|> <|nodiarize|>``; the languages alone tell
    transcription from translation. Cohere's model has a space before it.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        vocabulary = self._vocabulary
        self.sources = self.languages = tuple(
            sorted(result[1] for token in vocabulary if (result := _LANGUAGE.fullmatch(token)))
        )
        needed = (_PAD, _EOS, *_PROMPT_HEAD, *_PROMPT_TAIL, *_PUNCTUATION)
        missing = [token for token in needed if token not in vocabulary]
        if missing or not self.languages:
            raise ValueError(
                f"{self._path}: must have the prompt tokens of canary-1b-v2, but lacks "
                f"{', '.join(missing) or 'language tokens such as <|en|>'}."
            )
        self.pad_id = vocabulary[_PAD]
        self.eos_id = vocabulary[_EOS]
        self.timestamps = frame_numbers(vocabulary, _PROMPT_HEAD[0])
        self._head = self._prompt_head(Path(directory))

    def _prompt_head(self, folder: Path) -> tuple[str, ...]:
        """Return the tokens before the languages; which model it is stays with the tokenizer."""
        path, model = folder / SETTINGS_FILE, folder / "config.json"
        settings = read_json_object(path) if path.is_file() else {}
        if model.is_file() and read_json_object(model).get("model_type") == "cohere_asr":
            settings |= {"processor_class": _COHERE}
            self._files[SETTINGS_FILE] = json.dumps(settings, indent=2).encode()
        if settings.get("processor_class") != _COHERE:
            return _PROMPT_HEAD
        if _SPACE not in self._vocabulary:
            raise ValueError(f"{self._path}: must have the token {_SPACE!r}, but has not.")
        return (_SPACE, *_PROMPT_HEAD)

    def encode(self, text: str, language: str) -> list[int]:
        language = language_among(language, self.languages, "text")
        return super().encode(text, language)

    def prompt(self, prompt: Prompt) -> list[int]:
        languages = [f"<|{name}|>" for name in self.prompt_languages(prompt)]
        names = (*self._head, *languages, _PUNCTUATION[prompt.punctuation], *_PROMPT_TAIL)
        return [self._vocabulary[name] for name in names]


class ParakeetTokenizer(HuggingFaceTokenizer):
    """One that has the blank: ``<blank>``, or ``<pad>`` as its last token.

    It takes any language, as it cannot tell which ones it was made for, and has no prompts: the
    decoder that a Parakeet has not would start from ``pad_id``.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        blank = find_blank(self._vocabulary)
        if not blank:
            raise ValueError(
                f"{self._path}: must have the blank, {_BLANK} or {_PAD}, after all other tokens, "
                "but has not."
            )
        # What comes after the blank, if anything, has no class in the model.
        self.vocab_size = blank
        self.specials = {token: index for token, index in self.specials.items() if index < blank}
        self.sources = self.languages = ()
        pad = self._vocabulary.get(_PAD, blank)
        self.pad_id = pad if pad < blank else 0
        self.eos_id = self._vocabulary.get(_EOS, self.pad_id)

    def encode(self, text: str, language: str) -> list[int]:
        ids = super().encode(text, language)
        # A text that spells the blank's name would get a label that the model has not.
        return [index for index in ids if index < self.vocab_size]

    def prompt(self, prompt: Prompt) -> list[int]:
        return [self.pad_id]


class SentenceTokenizer(HuggingFaceTokenizer):
    """One of an omniASR, with ``<s>``, from which a decoder starts, and ``</s>``.

    It takes any language, as it cannot tell which ones it was made for.
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        self._begin_id, self.eos_id = (self._vocabulary[token] for token in _SENTENCE)
        self.pad_id = self._vocabulary.get(_PAD, self.eos_id)
        self.sources = self.languages = ()

    def prompt(self, prompt: Prompt) -> list[int]:
        return [self._begin_id]


def has_sentences(vocabulary: Mapping[str, int]) -> bool:
    """Return whether these are the tokens of a `SentenceTokenizer`, not of a Canary."""
    return vocabulary.keys() >= set(_SENTENCE) and _PROMPT_HEAD[1] not in vocabulary


def find_blank(vocabulary: Mapping[str, int]) -> int | None:
    """Return the blank of a Parakeet; None where these are the tokens of another model."""
    if _BLANK in vocabulary:
        return vocabulary[_BLANK]
    last = vocabulary.get(_PAD)
    return last if last is not None and last == max(vocabulary.values()) else None


def read_tokenizer_json(path: Path) -> Any:
    """Load the tokenizer file, or if it is missing, ``vocab.json`` and ``merges.txt``."""
    parts = [path.with_name(name) for name in (VOCABULARY_FILE, MERGES_FILE)]
    if not path.is_file() and not all(part.is_file() for part in parts):
        raise ValueError(f"{path}: there is no such file.")
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"{path}: needs the package `tokenizers`: pip install effasr[huggingface]."
        ) from error
    if not path.is_file():
        return _from_vocabulary(path.parent)
    text = read_text(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except BaseException as error:
        raise _unreadable(path, error) from error
    # A file keeps those of the last call before it was saved; transformers ignores them as well.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def is_tokenizer_error(error: BaseException) -> bool:
    """Return whether tokenizers may have raised an error: it raises Exception, and panics."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _unreadable(path: Path, error: BaseException) -> BaseException:
    """Return the error of a file that tokenizers cannot read."""
    if not is_tokenizer_error(error):
        return error
    return ValueError(f"{path}: not a tokenizer that can be read: {error}.")


def _from_vocabulary(folder: Path) -> Any:
    """Return the tokenizer of the three files that older checkpoints of Whisper have."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    for name in (VOCABULARY_FILE, MERGES_FILE):
        # tokenizers opens them by name, and reads them whatever their size.
        open_regular(folder / name, DOCUMENT_BYTES).close()
    try:
        model = models.BPE.from_file(str(folder / VOCABULARY_FILE), str(folder / MERGES_FILE))
        added_file = folder / ADDED_FILE
        added = read_json_object(added_file) if added_file.is_file() else {}
    except BaseException as error:
        raise _unreadable(folder, error) from error
    if not all(type(index) is int for index in added.values()):
        raise ValueError(f"{added_file}: must map tokens to their ids, which are whole numbers.")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(_EOS) is not None:
        added = {_EOS: tokenizer.token_to_id(_EOS), **added}
    for token, index in sorted(added.items(), key=lambda item: item[1]):
        special = not TIMESTAMP.fullmatch(token)
        tokenizer.add_tokens([AddedToken(token, normalized=False, special=special)])
        if tokenizer.token_to_id(token) != index:
            raise ValueError(
                f"{folder / ADDED_FILE}: the id of {token} must be "
                f"{tokenizer.token_to_id(token)}, the next one, but is {index}: take a checkpoint "
                f"that has {TOKENIZER_FILE}."
            )
    return tokenizer


# Tokenizers of wav2vec 2.0 models: a vocabulary of characters, in ``vocab.json``.


_SPECIALS = {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
_SETTINGS_FILES = "special_tokens_map.json", SETTINGS_FILE
_MOST_LANGUAGES = 8  # that an error names


def has_characters(folder: Path) -> bool:
    """Whether a folder has a ``vocab.json`` that belongs to no other tokenizer."""
    others = any((folder / name).is_file() for name in (TOKENIZER_FILE, MERGES_FILE))
    return (folder / VOCABULARY_FILE).is_file() and not others


class CharacterTokenizer(Tokenizer):
    """transformers' ``Wav2Vec2CTCTokenizer``, whose padding token is the blank.

    Its other tokens keep their order. A vocabulary of capital letters alone gets texts in capitals,
    one of small letters alone in small letters. MMS has a vocabulary for each language:
    ``language`` names one, by default that of ``target_lang``.
    """

    def __init__(self, directory: str | Path, language: str | None = None) -> None:
        folder = Path(directory)
        self._path = folder / VOCABULARY_FILE
        vocabulary: dict[str, Any] = read_json_object(self._path)
        self._settings: dict[str, Any] = {}
        for name in _SETTINGS_FILES:
            if (folder / name).is_file():
                self._settings |= read_json_object(folder / name)
        if isinstance(next(iter(vocabulary.values()), None), dict):
            vocabulary = self._of_language(vocabulary, language)
        if (folder / ADDED_FILE).is_file():
            added, model = read_json_object(folder / ADDED_FILE), folder / "config.json"
            settings = read_json_object(model) if model.is_file() else {}
            classes = settings.get("vocab_size") or math.inf
            # transformers adds tokens that a model was trained without: it never writes them.
            late = {x for x, n in added.items() if type(n) is int and n >= classes}
            vocabulary = {**vocabulary, **{x: n for x, n in added.items() if x not in late}}
        names = {kind: self._special(f"{kind}_token", name) for kind, name in _SPECIALS.items()}
        self._delimiter = self._special("word_delimiter_token", "|")
        self._vocabulary = vocabulary
        self._check(names["pad"])
        self.blank = vocabulary[names["pad"]]
        self._ids = {x: n - (n > self.blank) for x, n in vocabulary.items() if n != self.blank}
        self._tokens = {number: token for token, number in self._ids.items()}
        self.vocab_size = max(self._ids.values()) + 1
        self.specials = {x: self._ids[x] for x in names.values() if x in self._ids}
        self._unknown = self._ids.get(names["unk"])
        self.pad_id = self._ids[self._delimiter]
        self.eos_id = self._ids.get(names["eos"], self.pad_id)
        self.sources = self.languages = ()
        texts = [token for token in self._ids if token not in self.specials]
        longest_first = sorted((x for x in texts if len(x) > 1), key=len, reverse=True)
        self._pattern = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)
        self._letters = letters = frozenset("".join(texts))
        # A letter such as ß has no single one of the other case.
        cases = ((str.upper, self._capitals), (str.lower, str.lower))
        fits = (case for to, case in cases if all(to(x) == x or len(to(x)) > 1 for x in letters))
        self._case = next(fits, str)

    def _capitals(self, text: str) -> str:
        return "".join(x if x in self._letters else x.upper() for x in text)

    def _of_language(self, vocabularies: dict[str, Any], language: str | None) -> dict[str, Any]:
        chosen = language or self._settings.get("target_lang")
        if chosen not in vocabularies:
            names = sorted(vocabularies)
            more = ", ..." if len(names) > _MOST_LANGUAGES else ""
            raise ValueError(
                f"{self._path}: `--language` must be one of its {len(names)} languages "
                f"({', '.join(names[:_MOST_LANGUAGES])}{more}), but is {chosen}."
            )
        return vocabularies[chosen]

    def _special(self, name: str, default: str) -> str:
        value = self._settings.get(name) or default
        return str(value["content"] if isinstance(value, dict) else value)

    def _check(self, pad: str) -> None:
        if "Phoneme" in str(self._settings.get("tokenizer_class")):
            raise ValueError(
                f"{self._path}: must be a vocabulary of characters, but is of phonemes, which are "
                "not spelled here: import a model that was only pretrained, such as "
                "facebook/wav2vec2-large-lv60."
            )
        numbers = list(self._vocabulary.values())
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{self._path}: must map tokens to their numbers, but does not.")
        missing = [token for token in (pad, self._delimiter) if token not in self._vocabulary]
        if missing or len(numbers) < 2:
            raise ValueError(
                f"{self._path}: must have the blank {pad} and {self._delimiter} between words, but "
                f"lacks {' and '.join(missing) or 'characters'}: copy tokenizer_config.json of the "
                "model, too, which names them."
            )

    def encode(self, text: str, language: str) -> list[int]:
        """One vocabulary serves all languages."""
        tokens = self._pattern.findall(self._case(text).replace(" ", self._delimiter))
        ids = (self._ids.get(token, self._unknown) for token in tokens)
        return [number for number in ids if number is not None]

    def decode(self, ids: Iterable[int]) -> str:
        tokens = (self._tokens.get(number, "") for number in check_ids(ids, self.vocab_size))
        text = "".join(token for token in tokens if token not in self.specials)
        text = text.replace(self._delimiter, " ").strip()
        return text.lower() if self._settings.get("do_lower_case") else text

    def count_unknown(self, ids: Iterable[int]) -> int:
        return sum(number == self._unknown for number in ids)

    def prompt(self, prompt: Prompt) -> list[int]:
        """The decoder that such a model has not would start from it."""
        return [self.pad_id]

    def pieces(self) -> list[str]:
        names = {number: f"<{number}>" for number in range(self.vocab_size)} | self._tokens
        return ["▁" if x == self._delimiter else x for _, x in sorted(names.items())]

    def save(self, directory: str | Path) -> None:
        """Write the vocabulary of the language, and what `transformers` needs to read it."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            **{name: value for name, value in self._settings.items() if name != "target_lang"},
            "tokenizer_class": "Wav2Vec2CTCTokenizer",
        }
        for name, content in {VOCABULARY_FILE: self._vocabulary, SETTINGS_FILE: settings}.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (folder / name).write_text(text, encoding="utf-8")


# Tokenizers of Whisper models: byte-level BPE, languages, tasks and timestamps.


_START, _END, _NOTIMESTAMPS = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"
_TASKS = {"transcribe": "<|transcribe|>", "translate": "<|translate|>"}
_PREVIOUS, _NO_SPEECH = "<|startofprev|>", ("<|nospeech|>", "<|nocaptions|>")
_WHISPER_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
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
        missing = [name for name in (_START, _END, _NOTIMESTAMPS) if name not in vocabulary]
        result = (_WHISPER_LANGUAGE.fullmatch(token) for token in vocabulary)
        languages = tuple(sorted(match[1] for match in result if match))
        # English-only models have GPT-2's own vocabulary, and the others' languages to no purpose.
        self.is_multilingual = bool(languages) and vocabulary.get(_END) != _GPT2_EOS
        if self.is_multilingual:
            missing += [name for name in _TASKS.values() if name not in vocabulary]
        if missing:
            raise ValueError(
                f"{self._path}: must have the prompt tokens of Whisper, but lacks "
                f"{', '.join(missing)}."
            )
        self.sources = self.languages = languages if self.is_multilingual else (_TRANSLATION,)
        self.pad_id = self.eos_id = vocabulary[_END]
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
            language = next((name for name in tokens if _WHISPER_LANGUAGE.fullmatch(name)), None)
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
