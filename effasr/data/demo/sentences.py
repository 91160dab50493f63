"""Random sentences: digit strings and commands, in one language or in two at once.

A phrase is the same thing said in each language, so that a German sentence has exactly one
English translation. Nouns carry their article (German inflects it), and a template its own word
order.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

Phrase = Mapping[str, str]
"""Language code -> words, lower case, no punctuation; ``{name}`` is a slot."""


def _bilingual(*pairs: tuple[str, str]) -> tuple[Phrase, ...]:
    return tuple({"en": english, "de": german} for english, german in pairs)


def _english(*texts: str) -> tuple[Phrase, ...]:
    return tuple({"en": text} for text in texts)


DIGITS = _bilingual(
    ("zero", "null"),
    ("one", "eins"),
    ("two", "zwei"),
    ("three", "drei"),
    ("four", "vier"),
    ("five", "fünf"),
    ("six", "sechs"),
    ("seven", "sieben"),
    ("eight", "acht"),
    ("nine", "neun"),
)

AND: Phrase = {"en": "and", "de": "und"}

BILINGUAL_SLOTS: Mapping[str, tuple[Phrase, ...]] = {
    "device": _bilingual(
        ("the light", "das licht"),
        ("the lamp", "die lampe"),
        ("the radio", "das radio"),
        ("the heater", "die heizung"),
        ("the television", "den fernseher"),
    ),
    "room": _bilingual(
        ("in the kitchen", "in der küche"),
        ("in the bathroom", "im badezimmer"),
        ("in the garden", "im garten"),
        ("in the office", "im büro"),
    ),
    "opening": _bilingual(
        ("the window", "das fenster"),
        ("the door", "die tür"),
        ("the curtain", "den vorhang"),
    ),
    "person": _bilingual(
        ("anna", "anna"),
        ("peter", "peter"),
        ("maria", "maria"),
        ("thomas", "thomas"),
    ),
    "thing": _bilingual(
        ("the letter", "den brief"),
        ("the photo", "das foto"),
        ("the key", "den schlüssel"),
        ("the book", "das buch"),
    ),
    "hour": DIGITS[1:],
    # From two on: "minutes" keeps its plural.
    "count": DIGITS[2:],
}

BILINGUAL_TEMPLATES = _bilingual(
    ("turn on {device} {room}", "schalte {device} {room} ein"),
    ("turn off {device} {room}", "schalte {device} {room} aus"),
    ("open {opening} {room}", "öffne {opening} {room}"),
    ("close {opening} {room}", "schließe {opening} {room}"),
    ("call {person} at {hour}", "rufe {person} um {hour} an"),
    ("send {thing} to {person}", "schicke {person} {thing}"),
    ("wait {count} minutes", "warte {count} minuten"),
)

ENGLISH_SLOTS: Mapping[str, tuple[Phrase, ...]] = {
    **BILINGUAL_SLOTS,
    "city": _english("london", "berlin", "paris", "madrid"),
    "day": _english("today", "tomorrow", "on monday", "on friday"),
    "colour": _english("red", "green", "blue", "yellow"),
    "object": _english("box", "chair", "bottle", "table"),
    "place": _english("left", "right", "middle", "corner"),
    "music": _english("some music", "the news", "my favourite song", "a story"),
    "chore": _english("feed the cat", "water the plants", "buy some milk", "clean the floor"),
}

ENGLISH_TEMPLATES = (
    *BILINGUAL_TEMPLATES,
    *_english(
        "play {music} {room}",
        "show me the weather in {city} {day}",
        "move the {colour} {object} to the {place}",
        "remind me to {chore} {day}",
        "set the alarm {day} at {hour}",
    ),
)

MAX_DIGITS = 26
# Many short strings and some long ones: a model that hears at most six digits never aligns.
_DIGITS_SHAPE = (1.0, 2.5)  # of the beta distribution of the length
_CLAUSES = (1, 2, 3, 4)
_CLAUSE_WEIGHTS = (50, 27, 14, 9)
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One meaning, as clauses in every language of its grammar."""

    # Language -> the clauses, in order; a digit string is a single clause
    clauses: Mapping[str, tuple[str, ...]]

    def text(self, language: str) -> str:
        """Return the transcript: lower-case words, no punctuation."""
        return f" {AND[language]} ".join(self.clauses[language])

    def spoken(self, language: str) -> str:
        """Text for the synthesiser: a comma makes it pause between clauses."""
        return f", {AND[language]} ".join(self.clauses[language])

    def split(self) -> str:
        """Return the only split this sentence may occur in: ``train``, ``dev`` or ``test``.

        Decided by a hash of the English text, so a German sentence follows its translation.
        """
        digest = hashlib.sha256(self.text("en").encode()).digest()
        bucket = int.from_bytes(digest[:4], "big") % 100
        return "train" if bucket < 80 else "dev" if bucket < 88 else "test"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Templates and slot values over the same languages."""

    languages: tuple[str, ...]  # Codes of the languages that every phrase has
    templates: tuple[Phrase, ...]  # Clauses with ``{slot}`` places, no slot twice in one
    slots: Mapping[str, tuple[Phrase, ...]]  # Slot name -> its values

    def digits(self, rng: random.Random) -> Sentence:
        """Return a string of 1 to 26 digits, spelt as words: ``seven four two``."""
        length = min(1 + int(MAX_DIGITS * rng.betavariate(*_DIGITS_SHAPE)), MAX_DIGITS)
        chosen = rng.choices(DIGITS, k=length)
        return Sentence({lang: (" ".join(d[lang] for d in chosen),) for lang in self.languages})

    def command(self, rng: random.Random) -> Sentence:
        """Return one to four clauses: ``open the door in the office and wait two minutes``."""
        count = rng.choices(_CLAUSES, _CLAUSE_WEIGHTS)[0]
        clauses = []
        for template in rng.choices(self.templates, k=count):
            values = {name: rng.choice(self.slots[name]) for name in _SLOT.findall(template["en"])}
            clauses.append(self._fill(template, values))
        return Sentence({lang: tuple(c[lang] for c in clauses) for lang in self.languages})

    def _fill(self, template: Phrase, values: Mapping[str, Phrase]) -> Phrase:
        return {
            lang: template[lang].format(**{name: value[lang] for name, value in values.items()})
            for lang in self.languages
        }


ENGLISH = Grammar(("en",), ENGLISH_TEMPLATES, ENGLISH_SLOTS)
BILINGUAL = Grammar(("en", "de"), BILINGUAL_TEMPLATES, BILINGUAL_SLOTS)
