"""Which sentences the demo corpus has, and who speaks them."""

import random
import re
from collections import Counter, defaultdict
from itertools import combinations, product

import pytest

from effasr.data.demo.plan import SPLITS, plan
from effasr.data.demo.sentences import BILINGUAL, ENGLISH


def test_every_german_clause_has_one_translation_and_the_reverse():
    clauses = {"de": [], "en": []}
    for template in BILINGUAL.templates:
        names = re.findall(r"{(\w+)}", template["en"])
        for values in product(*(BILINGUAL.slots[name] for name in names)):
            for lang, texts in clauses.items():
                filled = {name: value[lang] for name, value in zip(names, values, strict=True)}
                texts.append(template[lang].format(**filled))
    german, english = set(clauses["de"]), set(clauses["en"])
    assert len(clauses["en"]) == len(german) == len(english) == 124
    # Clauses are joined by these words, which are in none.
    assert not any("and" in text.split() for text in english)
    assert not any("und" in text.split() for text in german)


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
