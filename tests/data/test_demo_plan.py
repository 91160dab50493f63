from collections import Counter, defaultdict
from itertools import combinations

import pytest

from effasr.data.demo.plan import ACCENTS, SPLITS, VARIANTS, Recording, plan, voices


@pytest.fixture(scope="module", params=[False, True], ids=["english", "multilingual"])
def recordings(request: pytest.FixtureRequest) -> list[Recording]:
    return plan(multilingual=request.param, utterances=1200, seed=3)


def test_no_sentence_is_in_two_splits_in_any_language(recordings: list[Recording]) -> None:
    texts = defaultdict(set)
    for item in recordings:
        texts[item.split].update(item.texts.values())
    for entry, other in combinations(SPLITS, 2):
        assert not texts[entry] & texts[other]


def test_no_timbre_is_in_two_splits(recordings: list[Recording]) -> None:
    timbres = defaultdict(set)
    for item in recordings:
        timbres[item.split].add(item.voice.partition("+")[2])
    for entry, other in combinations(SPLITS, 2):
        assert not timbres[entry] & timbres[other]


def test_every_voice_of_a_split_speaks_equally_often(recordings: list[Recording]) -> None:
    for split in SPLITS:
        for language in {item.language for item in recordings}:
            spoken = Counter(
                i.voice for i in recordings if i.split == split and i.language == language
            )
            assert set(spoken) == {voice.name for voice in voices(split, language)}
            assert max(spoken.values()) - min(spoken.values()) <= 1


def test_enough_voices() -> None:
    assert len(ACCENTS["en"]) == 4
    assert len(VARIANTS["train"]) >= 24
    assert len(VARIANTS["test"]) >= 8


def test_no_word_is_heard_only_in_the_held_out_splits(recordings: list[Recording]) -> None:
    words = defaultdict(set)
    for item in recordings:
        for text in item.texts.values():
            words[item.split].update(text.split())
    assert words["dev"] | words["test"] <= words["train"]


def test_counts(recordings: list[Recording]) -> None:
    assert Counter(item.split for item in recordings) == {"train": 1200, "dev": 60, "test": 120}
    assert len({item.path for item in recordings}) == len(recordings)


def test_half_of_the_multilingual_corpus_is_german_with_translations() -> None:
    planned = plan(multilingual=True, utterances=100, seed=0)
    german = [item for item in planned if item.language == "de"]
    assert 2 * len(german) == pytest.approx(len(planned), abs=3)
    assert all(set(item.texts) == {"en", "de"} for item in german)
    assert all(item.voice.startswith("de+") for item in german)


def test_only_the_arguments_decide() -> None:
    first = plan(multilingual=False, utterances=40, seed=7)
    assert first == plan(multilingual=False, utterances=40, seed=7)
    assert first != plan(multilingual=False, utterances=40, seed=8)
