"""Abstract base class of tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from effasr.checks import check
from effasr.data.languages import UnknownLanguageError, language_among
from effasr.data.prompt import Prompt


@dataclass(frozen=True, slots=True)
class TimestampTokens:
    """Tokens of times in a text, and those of the prompt that concern them.

    All classes of a Whisper after those of its prompts are times, which tokenizers need not list.
    """

    start: int  # the first of a prompt, but for earlier text
    without: int  # in a prompt after which a text has no times
    first: int  # that of the beginning of the audio
    previous: int | None = None  # before earlier text
    no_speech: int | None = None
    marker: int | None = None  # of a Canary, in place of ``without`` where words have times
    step: float = 0.02  # seconds between two times
    count: int = 1501

    @property
    def last_seconds(self) -> float:
        return self.seconds_of(self.first + self.count - 1)

    def seconds_of(self, token: int) -> float:
        return round((token - self.first) * self.step, 2)

    def is_time(self, token: int) -> bool:
        return self.first <= token < self.first + self.count

    def plain(self, tokens: Iterable[int]) -> list[int]:
        """Return the tokens that are no times."""
        return [token for token in tokens if not self.is_time(token)]

    def timed(self, tokens: Iterable[int], seconds: Sequence[float]) -> list[int]:
        """Return tokens with these times in place of theirs."""
        rule, last = f"be none for times after {self.last_seconds:g} s", f"{max(seconds):.2f} s"
        is_known = max(seconds) <= self.last_seconds
        check(is_known, "data.timestamps", rule, last, "lower data.max_duration")
        new = (self.first + round(time / self.step) for time in seconds)
        return [next(new) if self.is_time(token) else token for token in tokens]

    def prompt(self, prompt: Iterable[int]) -> list[int]:
        """Return a prompt after which a text has times."""
        tokens = (self.marker if token == self.without else token for token in prompt)
        return [token for token in tokens if token is not None]


def frame_numbers(vocabulary: Mapping[str, int], start: str) -> TimestampTokens | None:
    """Return Canary's tokens of frames of 80 ms, ``<|0|>`` and on; None without them."""
    first, count = vocabulary.get("<|0|>", 0), 0
    while vocabulary.get(f"<|{count}|>") == first + count:
        count += 1
    names = (start, "<|notimestamp|>", "<|timestamp|>")
    if not count or not set(names) <= vocabulary.keys():
        return None
    begin, without, marker = (vocabulary[name] for name in names)
    return TimestampTokens(begin, without, first, marker=marker, step=0.08, count=count)


class Tokenizer(ABC):
    """Text to token ids and back, and prompts as token ids."""

    vocab_size: int  # Ids are ``0 .. vocab_size - 1``; the CTC blank is ``vocab_size``
    pad_id: int  # Fills the tail of a static shape; no loss sees it
    eos_id: int  # Ends a transcript
    specials: Mapping[str, int]  # Ids by token, of tokens that are no text
    languages: tuple[str, ...]  # Languages that text may be in
    sources: tuple[str, ...]  # Languages that speech may be in
    timestamps: TimestampTokens | None = None
    subsampling: int | None = None  # That of models which its size was chosen for, if it was

    @abstractmethod
    def encode(self, text: str, language: str) -> list[int]:
        """Token ids of a text, without prompt and end."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids; special tokens are skipped."""

    @abstractmethod
    def prompt(self, prompt: Prompt) -> list[int]:
        """Return the tokens that the decoder reads before it writes."""

    @abstractmethod
    def count_unknown(self, ids: Iterable[int]) -> int:
        """Return how many of these ids stand for text that the vocabulary cannot spell."""

    @abstractmethod
    def pieces(self) -> list[str]:
        """Return the piece of every id, with U+2581 for a space; special tokens by their names."""

    @abstractmethod
    def save(self, directory: str | Path) -> None:
        """Write the tokenizer where `effasr.data.tokenizer.load_tokenizer` can read it."""

    @property
    def blank_id(self) -> int:
        """The class of the CTC blank, the last of ``vocab_size + 1``."""
        return self.vocab_size

    def knows(self, language: str) -> bool:
        try:
            return bool(language_among(language, self.languages, "text"))
        except UnknownLanguageError:
            return False

    def prompt_languages(self, prompt: Prompt) -> tuple[str, str]:
        """Return both languages of a request, by their names in the tokenizer."""
        source = language_among(prompt.source, self.sources, "speech")
        return source, language_among(prompt.target, self.languages, "text")


def check_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return the ids as a list."""
    checked = [int(token) for token in ids]
    for token in checked:
        if not 0 <= token < vocab_size:
            raise ValueError(f"`ids` must be in 0 .. {vocab_size - 1}, but one is {token}.")
    return checked


# Placeholder tokenizer of models that were pretrained on audio alone.

NO_TOKENIZER_FILE = "no_tokenizer.json"

_REMEDY = (
    "the model was pretrained on audio alone and has no tokenizer: fine-tune it with init_from and "
    "data.tokenizer."
)


class NoTokenizer(Tokenizer):
    """A tokenizer without texts; whoever asks for tokens gets a ValueError."""

    vocab_size = 1
    pad_id = eos_id = 0
    specials: Mapping[str, int] = {}
    languages = sources = ()

    def encode(self, text: str, language: str) -> NoReturn:
        raise ValueError(_REMEDY)

    def decode(self, ids: Iterable[int]) -> NoReturn:
        raise ValueError(_REMEDY)

    def prompt(self, prompt: Prompt) -> NoReturn:
        raise ValueError(_REMEDY)

    def count_unknown(self, ids: Iterable[int]) -> int:
        return 0

    def pieces(self) -> list[str]:
        return []

    def save(self, directory: str | Path) -> None:
        """Write the file by which `effasr.data.tokenizer.load_tokenizer` knows it."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / NO_TOKENIZER_FILE).write_text("{}\n")
