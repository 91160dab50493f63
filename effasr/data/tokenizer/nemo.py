"""Tokenizers of NeMo's models: SentencePiece models, with the prompts of a Canary or without."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from effasr.checks import check
from effasr.data.languages import language_among
from effasr.data.prompt import Prompt
from effasr.data.tokenizer.base import check_ids, frame_numbers
from effasr.data.tokenizer.sentence_piece import AggregateTokenizer, read_metadata, read_models

NEMO_FILE = "nemo_tokenizer.json"
"""File that identifies such a folder."""

SPECIAL = "spl_tokens"
"""The model of the special tokens of an aggregate tokenizer, where NeMo looks for them."""

UNIFIED = "tokenizer"
"""The name of a model that serves all languages."""

_REMEDY = "import the .nemo file again"
_PAD, _EOS, _START = "<pad>", "<|endoftext|>", "<|startoftranscript|>"
_PUNCTUATION = ("<|nopnc|>", "<|pnc|>")
_CONTEXT, _EMOTION = "<|startofcontext|>", "<|emo:undefined|>"
_PLAIN = ("<|noitn|>", "<|notimestamp|>", "<|nodiarize|>")
_NEEDED = {
    "canary": (_PAD, _EOS, _START, *_PUNCTUATION, "<|transcribe|>", "<|translate|>"),
    "canary2": (_PAD, _EOS, _CONTEXT, _START, _EMOTION, *_PUNCTUATION, *_PLAIN),
}
PROMPT_FORMATS = tuple(_NEEDED)
_LANGUAGE = re.compile(r"<\|([a-z]{2}(?:-[A-Z]{2})?)\|>")
_NAME = re.compile(r"[\w-]+")
# NeMo finds these models by the short code, too.
_SHORT = {"en-US": "en", "es-ES": "es", "fr-FR": "fr", "de-DE": "de"}


class NeMoTokenizer(AggregateTokenizer):
    """The ids of each model follow those of the one before it, as in NeMo's aggregate tokenizer.

    With a prompt format, special tokens make prompts: ``canary`` (canary-1b) is
    ``<|startoftranscript|> <|source|> <|task|> <|target|> <|pnc|>``, and ``canary2``
    (canary-1b-flash, canary-1b-v2) ``<|startofcontext|> <|startoftranscript|> <|emo:undefined|>
    <|source|> <|target|> <|pnc|> <|noitn|> <|notimestamp|> <|nodiarize|>``. Without one, it is that
    of a CTC model or a transducer, which have no prompts.
    """

    def __init__(self, models: Mapping[str, bytes], prompt_format: str | None = None) -> None:
        check(models, "models", "hold at least one model", "empty")
        for name in models:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"`models` must be named by languages, of letters and dashes, but one is "
                    f"{name!r}."
                )
        rule = f"be {' or '.join(PROMPT_FORMATS)}"
        check(prompt_format in (None, *PROMPT_FORMATS), "prompt_format", rule, prompt_format)
        super().__init__(models)
        self.prompt_format = prompt_format
        self.specials = self._find_specials()
        self._check_specials()
        self.timestamps = frame_numbers(self.specials, _CONTEXT)
        self._skipped = set(self.specials.values())
        if SPECIAL in models:
            # It has pieces beside the tokens, which stand for no text either.
            position = self._names.index(SPECIAL)
            first = self._offsets[position]
            self._skipped.update(range(first, first + self._sizes[position]))
        self.pad_id = self.specials.get(_PAD, 0)
        self.eos_id = self.specials.get(_EOS, self.pad_id)
        tags = {result[1] for token in self.specials if (result := _LANGUAGE.fullmatch(token))}
        self._places = self._find_places(tags)
        self.languages = tuple(sorted(tags if self.is_unified else self._places))
        self.sources = tuple(sorted(tags)) if prompt_format else self.languages

    @property
    def is_unified(self) -> bool:
        """Whether one model serves all languages."""
        return self._names == [UNIFIED]

    def extended(self, models: Mapping[str, bytes]) -> "NeMoTokenizer":
        missing = [name for name in models if self.specials and f"<|{name}|>" not in self.specials]
        rule = "be a tokenizer with a model and, for prompts, a special token for each language"
        value = "with one model for all" if self.is_unified else f"without {', '.join(missing)}"
        check(not self.is_unified and not missing, "extend", rule, f"one {value}")
        return NeMoTokenizer({**self.models, **models}, self.prompt_format)

    @property
    def pieces_by_model(self) -> list[list[str]]:
        """The tokens of each model, in the order of their ids."""
        return [
            [processor.id_to_piece(index) for index in range(processor.vocab_size())]
            for processor in self._processors
        ]

    def encode(self, text: str, language: str) -> list[int]:
        """A unified tokenizer without prompts takes any language."""
        if self.languages:
            language = language_among(language, self.languages, "text")
        position = 0 if self.is_unified else self._places[language]
        return self._encode(text, position)

    def decode(self, ids: Iterable[int]) -> str:
        selected = [
            token for token in check_ids(ids, self.vocab_size) if token not in self._skipped
        ]
        text = ""
        for position, local in self._runs(selected):
            processor = self._processors[position]
            # The first piece says whether a word begins; the model drops that of a text.
            space = " " if processor.id_to_piece(local[0]).startswith("▁") else ""
            text += space + processor.decode(local).removeprefix(space)
        return text.strip()

    def prompt(self, prompt: Prompt) -> list[int]:
        if self.prompt_format is None:
            return [self.pad_id]
        source, target = (f"<|{language}|>" for language in self.prompt_languages(prompt))
        punctuation = _PUNCTUATION[prompt.punctuation]
        if self.prompt_format == "canary":
            names = (_START, source, f"<|{prompt.task}|>", target, punctuation)
        else:
            names = (_CONTEXT, _START, _EMOTION, source, target, punctuation, *_PLAIN)
        if self.is_unified:
            # NeMo encodes it as a text, which may begin with the mark of a word.
            return self._processors[0].encode("".join(names))
        return [self.specials[name] for name in names]

    def save(self, directory: str | Path) -> None:
        """Write one ``.model`` file per model and `NEMO_FILE`."""
        metadata = {
            "prompt_format": self.prompt_format,
            "models": self._names,
            "vocab_size": self.vocab_size,
        }
        self._write(directory, NEMO_FILE, metadata)

    @classmethod
    def load(cls, directory: str | Path) -> "NeMoTokenizer":
        """Read what `save` wrote."""
        path = Path(directory) / NEMO_FILE
        metadata = read_metadata(path, _REMEDY)
        files = {name: f"{name}.model" for name in metadata["models"]}
        tokenizer = cls(read_models(path.parent, files, _REMEDY), metadata["prompt_format"])
        if tokenizer.vocab_size != metadata["vocab_size"]:
            raise ValueError(
                f"{path}: its models must have {metadata['vocab_size']} tokens, but have "
                f"{tokenizer.vocab_size}: {_REMEDY}."
            )
        return tokenizer

    def _find_specials(self) -> dict[str, int]:
        """Return the ids of tokens that are not text."""
        if self.prompt_format is None:
            return {}
        name = UNIFIED if self.is_unified else SPECIAL
        if name not in self._names:
            raise ValueError(
                f"`models` must have one named {SPECIAL} for prompts, but are "
                f"{', '.join(self._names)}."
            )
        position = self._names.index(name)
        return {
            piece: self._offsets[position] + index
            for index, piece in enumerate(self.pieces_by_model[position])
            if piece == _PAD or re.fullmatch(r"<\|.+\|>", piece)
        }

    def _check_specials(self) -> None:
        if self.prompt_format is None:
            return
        missing = [name for name in _NEEDED[self.prompt_format] if name not in self.specials]
        if missing:
            raise ValueError(
                f"`models` must have the tokens of `prompt_format` = {self.prompt_format}, but "
                f"lack {', '.join(missing)}."
            )

    def _find_places(self, tags: set[str]) -> dict[str, int]:
        """Return the model of each language; of a Canary's, those that its prompts can name."""
        places = {name: position for position, name in enumerate(self._names) if name != SPECIAL}
        for name, short in _SHORT.items():
            if name in places:
                places.setdefault(short, places[name])
        if self.prompt_format is None:
            return places
        return {language: position for language, position in places.items() if language in tags}
