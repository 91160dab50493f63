"""The words of the demo corpus: digits, clause templates and what fills their slots.

A phrase is the same thing said in each language, so that a German sentence has exactly one English
translation. Nouns carry their article (German inflects it), and a template its own word order.
"""

from __future__ import annotations

from collections.abc import Mapping

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
