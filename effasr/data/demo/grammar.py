"""Random sentences: digit strings and commands, in one language or in two at once."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from effasr.data.demo import phrases
from effasr.data.demo.phrases import Phrase

MAX_DIGITS = 26
# Many short strings and some long ones: a model that hears at most six digits never aligns.
_DIGITS_SHAPE = (1.0, 2.5)  # of the beta distribution of the length
_CLAUSES = (1, 2, 3, 4)
_CLAUSE_WEIGHTS = (50, 27, 14, 9)
_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Sentence:
    """One meaning, as clauses in every language of its grammar.

    Attributes:
        clauses: Language -> the clauses, in order; a digit string is a single clause.
    """

    clauses: Mapping[str, tuple[str, ...]]

    def text(self, language: str) -> str:
        """Return the transcript: lower-case words, no punctuation."""
        return f" {phrases.AND[language]} ".join(self.clauses[language])

    def spoken(self, language: str) -> str:
        """Text for the synthesiser: a comma makes it pause between clauses."""
        return f", {phrases.AND[language]} ".join(self.clauses[language])

    def split(self) -> str:
        """Return the only split this sentence may occur in: ``train``, ``dev`` or ``test``.

        Decided by a hash of the English text, so a German sentence follows its translation.
        """
        digest = hashlib.sha256(self.text("en").encode()).digest()
        bucket = int.from_bytes(digest[:4], "big") % 100
        return "train" if bucket < 80 else "dev" if bucket < 88 else "test"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Templates and slot values over the same languages.

    Attributes:
        languages: Codes of the languages that every phrase has.
        templates: Clauses with ``{slot}`` places, no slot twice in one.
        slots: Slot name -> its values.
    """

    languages: tuple[str, ...]
    templates: tuple[Phrase, ...]
    slots: Mapping[str, tuple[Phrase, ...]]

    def digits(self, rng: random.Random) -> Sentence:
        """Return a string of 1 to 26 digits, spelt as words: ``seven four two``."""
        length = min(1 + int(MAX_DIGITS * rng.betavariate(*_DIGITS_SHAPE)), MAX_DIGITS)
        chosen = rng.choices(phrases.DIGITS, k=length)
        return Sentence({lang: (" ".join(d[lang] for d in chosen),) for lang in self.languages})

    def command(self, rng: random.Random) -> Sentence:
        """Return one to four clauses: ``open the door in the office and wait two minutes``."""
        count = rng.choices(_CLAUSES, _CLAUSE_WEIGHTS)[0]
        clauses = []
        for template in rng.choices(self.templates, k=count):
            values = {name: rng.choice(self.slots[name]) for name in _SLOT.findall(template["en"])}
            clauses.append(self._fill(template, values))
        return Sentence({lang: tuple(c[lang] for c in clauses) for lang in self.languages})

    def all_clauses(self) -> Iterator[Phrase]:
        """Yield every clause of the grammar once."""
        for template in self.templates:
            names = _SLOT.findall(template["en"])
            for values in product(*(self.slots[name] for name in names)):
                yield self._fill(template, dict(zip(names, values, strict=True)))

    def _fill(self, template: Phrase, values: Mapping[str, Phrase]) -> Phrase:
        return {
            lang: template[lang].format(**{name: value[lang] for name, value in values.items()})
            for lang in self.languages
        }


ENGLISH = Grammar(("en",), phrases.ENGLISH_TEMPLATES, phrases.ENGLISH_SLOTS)
BILINGUAL = Grammar(("en", "de"), phrases.BILINGUAL_TEMPLATES, phrases.BILINGUAL_SLOTS)
