"""Answers from the cache are those of transformers' own generation."""

import pytest
import torch

from effasr.data.conversation.collate import asking
from effasr.decoding.language_model.engine import answers
from tests.support.speech_llm import (
    FAMILIES,
    VOCABULARY,
    conversations,
    make_conversation_batch,
    speech_llm,
)

pytest.importorskip("transformers")

LIMIT = 9
STOPS = (2, 7)


def questions():
    """Conversations up to the first token that is to be written."""
    found = []
    for one in conversations():
        written = next(n for n, row in enumerate(one.rows) if -VOCABULARY <= row < 0)
        found.append(asking(one.id, one.rows[:written].tolist(), one.clips[: count(one, written)]))
    return found


def count(one, written):
    return sum(row < -VOCABULARY for row in one.rows[:written].tolist())


def generated(model, example, stops=STOPS, **options):
    """The answer of transformers' generate to the input rows of one conversation."""
    batch = make_conversation_batch([example])
    with torch.no_grad():
        encoded = model.encode(batch).values if example.clips else None
        rows = model.language_model.embed(batch, encoded)[None]
        with model.language_model._as_causal() as causal:
            causal.config.use_cache = True
            found = causal.generate(
                inputs_embeds=rows,
                attention_mask=torch.ones(rows.shape[:2], dtype=torch.int64),
                do_sample=False,
                max_new_tokens=LIMIT,
                eos_token_id=list(stops),
                pad_token_id=0,
                **options,
            )
            causal.config.use_cache = False
    tokens = found[0].tolist()
    ends = [n for n, token in enumerate(tokens) if token in stops]
    return (tuple(tokens[: ends[0]]), False) if ends else (tuple(tokens), True)


@pytest.mark.parametrize("kind", FAMILIES)
def test_greedy_answers_are_transformers(kind):
    model = speech_llm(kind)
    batch = make_conversation_batch(questions())
    found = answers(model, batch, [LIMIT] * 4, STOPS)
    expected = [generated(model, one) for one in questions()]
    assert [(one.tokens, one.truncated) for one in found] == expected
    assert len(set(expected)) > 1


def test_answers_end_at_stop_tokens():
    model = speech_llm("gemma")
    (free,) = answers(model, make_conversation_batch(questions()[:1]), [LIMIT], ())
    assert len(free.tokens) == LIMIT
    assert free.truncated
    stop = free.tokens[3]
    first = free.tokens.index(stop)
    (ended,) = answers(model, make_conversation_batch(questions()[:1]), [LIMIT], (stop,))
    assert ended.tokens == free.tokens[:first]
    assert not ended.truncated


def test_each_conversation_has_its_own_limit():
    model = speech_llm()
    batch = make_conversation_batch(questions())
    found = answers(model, batch, [1, 3, 9, 2], ())
    assert [len(one.tokens) for one in found] == [1, 3, 9, 2]
    whole = answers(model, batch, [9] * 4, ())
    for one, other in zip(found, whole, strict=True):
        assert one.tokens == other.tokens[: len(one.tokens)]


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_beams_find_what_transformers_finds(kind):
    model = speech_llm(kind, seed=3)
    # Wide, as the two searches drop other hypotheses: here those that end leave the beam.
    options = {"num_beams": 24, "length_penalty": 0.0, "early_stopping": "never"}
    batch = make_conversation_batch(questions())
    found = answers(model, batch, [LIMIT] * 4, STOPS, beam=24, length_penalty=0.0)
    expected = [generated(model, one, **options) for one in questions()]
    # transformers ranks answers that reach the limit among those that end, which go first here.
    ended = [n for n, (_, truncated) in enumerate(expected) if not truncated]
    assert len(ended) >= 2
    assert [found[n].tokens for n in ended] == [expected[n][0] for n in ended]
    assert not any(found[n].truncated for n in ended)


def test_a_beam_ranks_no_answer_below_greedy():
    model = speech_llm("qwen2", seed=1)
    batch = make_conversation_batch(questions())
    greedy = answers(model, batch, [LIMIT] * 4, STOPS)
    wide = answers(model, batch, [LIMIT] * 4, STOPS, beam=5)
    for one, other in zip(greedy, wide, strict=True):
        # What ended is compared with what ended; what did not had no end in any hypothesis.
        assert not (other.truncated and not one.truncated)


def test_classes_past_the_tokenizer_are_never_written():
    model = speech_llm()
    batch = make_conversation_batch(questions())
    found = answers(model, batch, [LIMIT] * 4, (), classes=11)
    assert all(token < 11 for one in found for token in one.tokens)


def test_no_conversation_has_no_answer():
    assert answers(speech_llm(), make_conversation_batch([]), [], STOPS) == []


def test_wrong_limits_are_refused():
    with pytest.raises(ValueError, match="`limits`"):
        answers(speech_llm(), make_conversation_batch(questions()), [3, 0, 1, 1], STOPS)
