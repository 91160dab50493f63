"""Plans every recording of the demo corpus before any is synthesised."""

import hashlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

# Random sentences: digit strings and commands, in one language or in two at once.
#
# A phrase is the same thing said in each language, so that a German sentence has exactly one
# English translation. Nouns carry their article (German inflects it), and a template its own word
# order.


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


# Which voices speak in which split; no variant is in two of them.
#
# Chosen by the distance between their log spectra, frame by frame: of variants that are near copies
# (Gene and Gene2; steph, steph2 and steph3) one is used, and every held-out one is well apart from
# those of the other splits. Variants that whisper or imitate robots are left out.

ACCENTS: Mapping[str, tuple[str, ...]] = {
    "en": ("en-us", "en", "en-gb-x-rp", "en-gb-scotland"),
    "de": ("de",),
}
"""Language -> the synthesiser's voices for it (``en`` is British English)."""

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "train": (
        *("m1", "m2", "m3", "m4", "m6", "m7", "m8", "f1", "f3", "f5", "adam", "Alex"),
        *("Annie", "belinda", "boris", "Diogo", "Gene2", "grandma", "grandpa", "Henrique"),
        *("john", "Michael", "Mike", "shelby"),
    ),
    "dev": ("m5", "f4", "travis", "marcelo"),
    "test": ("f2", "linda", "Denis", "quincy", "robert", "sandro", "paul", "steph"),
}
"""Split -> timbres that any accent can take."""


def voices(split: str, language: str) -> list[str]:
    """Return the synthesiser's names of a split's voices, in a fixed order: ``en-us+f1``."""
    return [f"{accent}+{variant}" for variant in VARIANTS[split] for accent in ACCENTS[language]]


SPLITS = ("train", "dev", "test")
_HELD_OUT_SHARE = {"dev": 0.05, "test": 0.10}  # of the training recordings
_RATES = (135, 150, 165, 180, 195)  # words a minute
_PITCH = (40, 60)  # the synthesiser's scale, 50 is the voice's own
_SNR_DB = (12.0, 40.0)
_GAIN_DB = (-12.0, 3.0)
_NOISE_SLOPES = (0.0, 1.0, 2.0)  # power falls as 1/f^slope: white, pink, brown
_MARGIN_S = (0.02, 0.12)  # background before and after the speech


@dataclass(frozen=True, slots=True)
class Recording:
    """One audio file to be made."""

    path: str  # Relative to the corpus
    split: str  # ``train``, ``dev`` or ``test``
    language: str  # Spoken language
    # Language -> text: the transcript first, then the English translation if there is one
    texts: dict[str, str]
    spoken: str  # Text for the synthesiser
    voice: str  # The synthesiser's name for the voice
    rate: int  # Words a minute
    pitch: int  # 0 to 100, 50 is the voice's own
    gain_db: float  # Level of the speech relative to the corpus' reference level
    snr_db: float  # Speech power over noise power
    noise_slope: float  # Noise power falls as 1 / f^slope
    lead_s: float  # Seconds of background before the speech
    tail_s: float  # Seconds of background after it
    seed: int  # Seed of the noise


def plan(*, multilingual: bool, utterances: int, seed: int) -> list[Recording]:
    """Return the whole corpus, a pure function of its arguments."""
    recordings: list[Recording] = []
    grammar = BILINGUAL if multilingual else ENGLISH
    for split in SPLITS:
        count = max(2, round(utterances * _HELD_OUT_SHARE.get(split, 1.0)))
        for language in grammar.languages:
            share = count // len(grammar.languages)
            rng = random.Random(f"{seed}/{split}/{language}")
            # Digit strings and commands by turns, all of the split; short ones recur, as in speech.
            sentences: list[Sentence] = []
            while len(sentences) < share:
                sentence = grammar.command(rng) if len(sentences) % 2 else grammar.digits(rng)
                if sentence.split() == split:
                    sentences.append(sentence)
            recordings += _cast(sentences, split, language, rng, first=len(recordings))
    return recordings


def _cast(
    sentences: list[Sentence], split: str, language: str, rng: random.Random, *, first: int
) -> list[Recording]:
    """Assign a voice to each sentence, all equally often, and its recording conditions."""
    cast = voices(split, language)
    rng.shuffle(sentences)
    rng.shuffle(cast)
    return [
        Recording(
            path=f"{split}/audio/{language}-{first + i:05d}.wav",
            split=split,
            language=language,
            texts={lang: sentence.text(lang) for lang in dict.fromkeys((language, "en"))},
            spoken=sentence.spoken(language),
            voice=cast[i % len(cast)],
            rate=rng.choice(_RATES),
            pitch=rng.randint(*_PITCH),
            gain_db=rng.uniform(*_GAIN_DB),
            snr_db=rng.uniform(*_SNR_DB),
            noise_slope=rng.choice(_NOISE_SLOPES),
            lead_s=rng.uniform(*_MARGIN_S),
            tail_s=rng.uniform(*_MARGIN_S),
            seed=rng.getrandbits(32),
        )
        for i, sentence in enumerate(sentences)
    ]
