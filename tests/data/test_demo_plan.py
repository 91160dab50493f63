"""Which sentences the demo corpus has, and who speaks them."""

import random
import re
from collections import Counter, defaultdict
from itertools import combinations

import pytest

from effasr.data.demo.plan import SPLITS, plan, voices
from effasr.data.demo.sentences import BILINGUAL, DIGITS, ENGLISH, MAX_DIGITS, Sentence


def test_every_german_clause_has_one_translation_and_the_reverse():
    clauses = list(BILINGUAL.all_clauses())
    german, english = ({clause[language] for clause in clauses} for language in ("de", "en"))
    assert len(clauses) == len(german) == len(english) == 124
    # Clauses are joined by these words, which are in none.
    assert not any("and" in text.split() for text in english)
    assert not any("und" in text.split() for text in german)


@pytest.mark.parametrize(
    ("german", "english"),
    [
        ("schalte die lampe in der küche ein", "turn on the lamp in the kitchen"),
        ("schalte den fernseher im garten aus", "turn off the television in the garden"),
        ("rufe peter um sieben an", "call peter at seven"),
        ("schicke anna den schlüssel", "send the key to anna"),
        ("warte neun minuten", "wait nine minutes"),
    ],
)
def test_translation(german, english):
    assert {"de": german, "en": english} in list(BILINGUAL.all_clauses())


@pytest.mark.parametrize("grammar", [ENGLISH, BILINGUAL])
def test_templates_become_lower_case_words_in_every_language(grammar):
    for template in grammar.templates:
        names = [sorted(re.findall(r"{(\w+)}", template[lang])) for lang in grammar.languages]
        assert all(result == names[0] for result in names)
        assert len(set(names[0])) == len(names[0])
    rng = random.Random(0)
    for _ in range(300):
        sentence = rng.choice((grammar.digits, grammar.command))(rng)
        for text in map(sentence.text, grammar.languages):
            assert all(word.isalpha() and word == word.lower() for word in text.split(" "))


def test_digit_strings_translate_word_by_word_and_are_short_and_long():
    table = {digit["de"]: digit["en"] for digit in DIGITS}
    rng, lengths = random.Random(1), []
    for _ in range(2000):
        sentence = BILINGUAL.digits(rng)
        words = sentence.text("de").split()
        assert " ".join(table[word] for word in words) == sentence.text("en")
        lengths.append(len(words))
    assert min(lengths) == 1
    assert 20 < max(lengths) <= MAX_DIGITS
    assert 5 <= sorted(lengths)[1000] <= 9


def test_the_spoken_form_pauses_where_the_transcript_joins():
    sentence = Sentence({"en": ("wait two minutes", "call anna at one")})
    assert sentence.text("en") == "wait two minutes and call anna at one"
    assert sentence.spoken("en") == "wait two minutes, and call anna at one"


def test_the_split_is_a_property_of_the_sentence():
    rng = random.Random(0)
    drawn = [rng.choice((BILINGUAL.digits, BILINGUAL.command))(rng) for _ in range(3000)]
    splits = {sentence.text("en"): sentence.split() for sentence in drawn}
    assert all(splits[sentence.text("en")] == sentence.split() for sentence in drawn)
    shares = Counter(splits.values())
    assert 0.74 < shares["train"] / len(splits) < 0.86
    assert 0.05 < shares["dev"] / len(splits) < 0.11
    assert 0.08 < shares["test"] / len(splits) < 0.16


@pytest.fixture(scope="module", params=[False, True], ids=["english", "multilingual"])
def recordings(request):
    return plan(multilingual=request.param, utterances=1200, seed=3)


def test_splits_have_no_sentence_and_no_voice_in_common(recordings):
    texts, timbres, words = defaultdict(set), defaultdict(set), defaultdict(set)
    for item in recordings:
        texts[item.split].update(item.texts.values())
        timbres[item.split].add(item.voice.partition("+")[2])
        words[item.split].update(" ".join(item.texts.values()).split())
    for entry, other in combinations(SPLITS, 2):
        assert not texts[entry] & texts[other]
        assert not timbres[entry] & timbres[other]
    # Every word that is tested was heard in training.
    assert words["dev"] | words["test"] <= words["train"]
    assert Counter(item.split for item in recordings) == {"train": 1200, "dev": 60, "test": 120}
    assert len({item.path for item in recordings}) == len(recordings)


def test_every_voice_of_a_split_speaks_equally_often(recordings):
    spoken = defaultdict(Counter)
    for item in recordings:
        spoken[item.split, item.language][item.voice] += 1
    for (split, language), counts in spoken.items():
        assert counts.keys() == {voice.name for voice in voices(split, language)}
        assert max(counts.values()) - min(counts.values()) <= 1


def test_half_of_the_multilingual_corpus_is_german_with_translations():
    planned = plan(multilingual=True, utterances=100, seed=0)
    german = [item for item in planned if item.language == "de"]
    assert 2 * len(german) == pytest.approx(len(planned), abs=3)
    assert all(set(item.texts) == {"en", "de"} for item in german)
    assert all(item.voice.startswith("de+") for item in german)


def test_only_the_arguments_decide():
    first, same, other = (plan(multilingual=False, utterances=40, seed=seed) for seed in (7, 7, 8))
    assert first == same != other
