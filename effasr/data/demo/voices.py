"""Which voices speak in which split; no variant is in two of them.

Chosen by the distance between their log spectra, frame by frame: of variants that are near copies
(Gene and Gene2; steph, steph2 and steph3) one is used, and every held-out one is well apart from
those of the other splits. Variants that whisper or imitate robots are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, order=True)
class Voice:
    """An accent with a timbre."""

    accent: str
    variant: str

    @property
    def name(self) -> str:
        """The synthesiser's name for it: ``en-us+f1``."""
        return f"{self.accent}+{self.variant}"


def voices(split: str, language: str) -> list[Voice]:
    """Return all voices of a split in a language, in a fixed order."""
    return [Voice(a, v) for v in VARIANTS[split] for a in ACCENTS[language]]
