import random
import re
from collections import Counter

import pytest

from effasr.data.demo.sentences import BILINGUAL, DIGITS, ENGLISH, MAX_DIGITS, Grammar, Sentence


def sentences(grammar: Grammar, count: int) -> list[Sentence]:
    rng = random.Random(0)
    return [rng.choice((grammar.digits, grammar.command))(rng) for _ in range(count)]


def test_every_german_clause_has_one_translation_and_the_reverse() -> None:
    clauses = list(BILINGUAL.all_clauses())
    german = Counter(clause["de"] for clause in clauses)
    english = Counter(clause["en"] for clause in clauses)
    assert len(clauses) == len(german) == len(english) == 124


def test_clauses_join_without_ambiguity() -> None:
    for clause in BILINGUAL.all_clauses():
        assert "and" not in clause["en"].split()
        assert "und" not in clause["de"].split()


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
def test_translation(german: str, english: str) -> None:
    assert {"de": german, "en": english} in list(BILINGUAL.all_clauses())


@pytest.mark.parametrize("grammar", [ENGLISH, BILINGUAL])
def test_a_template_fills_every_slot_in_every_language(grammar: Grammar) -> None:
    for template in grammar.templates:
        names = [sorted(re.findall(r"{(\w+)}", template[lang])) for lang in grammar.languages]
        assert all(result == names[0] for result in names)
        assert len(set(names[0])) == len(names[0])
    assert not any("{" in clause["en"] for clause in grammar.all_clauses())


def test_digit_strings_translate_word_by_word() -> None:
    table = {digit["de"]: digit["en"] for digit in DIGITS}
    rng = random.Random(1)
    for _ in range(100):
        sentence = BILINGUAL.digits(rng)
        words = sentence.text("de").split()
        assert " ".join(table[word] for word in words) == sentence.text("en")


def test_digit_strings_are_often_short_and_sometimes_long() -> None:
    rng = random.Random(2)
    lengths = [len(ENGLISH.digits(rng).text("en").split()) for _ in range(2000)]
    assert min(lengths) == 1
    assert 20 < max(lengths) <= MAX_DIGITS
    assert 5 <= sorted(lengths)[1000] <= 9


@pytest.mark.parametrize("grammar", [ENGLISH, BILINGUAL])
def test_texts_are_lower_case_words(grammar: Grammar) -> None:
    for sentence in sentences(grammar, 300):
        for language in grammar.languages:
            text = sentence.text(language)
            assert all(word.isalpha() and word == word.lower() for word in text.split(" "))


def test_the_spoken_form_pauses_where_the_transcript_joins() -> None:
    sentence = Sentence({"en": ("wait two minutes", "call anna at one")})
    assert sentence.text("en") == "wait two minutes and call anna at one"
    assert sentence.spoken("en") == "wait two minutes, and call anna at one"


def test_the_split_is_a_property_of_the_sentence() -> None:
    drawn = sentences(BILINGUAL, 3000)
    splits = {sentence.text("en"): sentence.split() for sentence in drawn}
    assert all(splits[sentence.text("en")] == sentence.split() for sentence in drawn)
    shares = Counter(splits.values())
    assert 0.74 < shares["train"] / len(splits) < 0.86
    assert 0.05 < shares["dev"] / len(splits) < 0.11
    assert 0.08 < shares["test"] / len(splits) < 0.16
