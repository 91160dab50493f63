"""Plans every recording of the demo corpus before any is synthesised."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from effasr.data.demo.sentences import BILINGUAL, ENGLISH, Grammar, Sentence

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
            sentences = _sentences(grammar, split, share, rng)
            recordings += _cast(sentences, split, language, rng, first=len(recordings))
    return recordings


def _sentences(grammar: Grammar, split: str, count: int, rng: random.Random) -> list[Sentence]:
    """Digit strings and commands by turns, all of the split; short ones recur, as in speech."""
    chosen: list[Sentence] = []
    while len(chosen) < count:
        sentence = grammar.command(rng) if len(chosen) % 2 else grammar.digits(rng)
        if sentence.split() == split:
            chosen.append(sentence)
    return chosen


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
