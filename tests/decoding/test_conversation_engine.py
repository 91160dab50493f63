"""Answers from the cache are those of transformers' generation, whatever else is answered."""

import math

import pytest
import torch

from effasr.data.conversation.batch import asking
from effasr.decoding.language_model import engine as engine_module
from effasr.decoding.language_model.engine import CachedConversations, ConversationEngine, answers
from effasr.nn.cache.paged import most_pages
from effasr_kernels import PackedLayout
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


def questions(count):
    """Conversations of several lengths, with and without speech."""
    result = []
    for seed in range(-(-count // 4)):
        for one in conversations(seed):
            written = next(n for n, row in enumerate(one.rows) if -VOCABULARY <= row < 0)
            clips = sum(row < -VOCABULARY for row in one.rows[:written].tolist())
            rows = one.rows[:written].tolist()
            result.append(asking(f"{seed}{one.id}", rows, one.clips[:clips]))
    return result[:count]


def generated(model, example, stops=STOPS, **options):
    """The answer of transformers' generate to the input rows of one conversation."""
    batch = make_conversation_batch([example])
    with torch.no_grad():
        encoded = model.encode(batch).values if example.clips else None
        rows = model.language_model.embed(batch, encoded)[None]
        with model.language_model._as_causal() as causal:
            causal.config.use_cache = True
            result = causal.generate(
                inputs_embeds=rows,
                attention_mask=torch.ones(rows.shape[:2], dtype=torch.int64),
                do_sample=False,
                max_new_tokens=LIMIT,
                eos_token_id=list(stops),
                pad_token_id=0,
                **options,
            )
            causal.config.use_cache = False
    return ended(result[0].tolist(), stops)


def ended(tokens, stops):
    """A text up to its end, and whether it has none."""
    ends = [n for n, token in enumerate(tokens) if token in stops]
    return (tuple(tokens[: ends[0]]), False) if ends else (tuple(tokens), True)


@pytest.mark.parametrize(
    ("kind", "beam"), [*((kind, 1) for kind in FAMILIES), ("llama", 24), ("gemma", 24)]
)
def test_answers_are_transformers(kind, beam):
    model = speech_llm(kind, seed=3)
    # Wide, as the two searches drop other hypotheses: here those that end leave the beam.
    options = {"num_beams": beam, "length_penalty": 0.0, "early_stopping": "never"}
    batch = make_conversation_batch(questions(4))
    result = answers(model, batch, [LIMIT] * 4, STOPS, beam=beam)
    expected = [generated(model, item, **options if beam > 1 else {}) for item in questions(4)]
    # transformers ranks answers that reach the limit among those that end, which go first here.
    compared = [n for n, (_, truncated) in enumerate(expected) if beam == 1 or not truncated]
    assert len(compared) > 1
    assert [(result[n].tokens, result[n].truncated) for n in compared] == [
        expected[n] for n in compared
    ]


@torch.no_grad()
def test_a_beam_ranks_answers_by_their_tokens_with_the_end():
    """By a penalty a little under and over that by which the best answer of one token wins."""
    model, read, stop = speech_llm("qwen2", seed=2), [5, 9, 11, 4], 2

    def log_probs(tokens):
        layout = PackedLayout.from_lengths([len(tokens)])
        hidden = model.language_model(
            model.language_model.embed_tokens(torch.tensor(tokens)), layout
        )
        return model.language_model.logits(hidden)[-1].double().log_softmax(-1).tolist()

    first = log_probs(read)
    others = {t: first[t] + log_probs([*read, t])[stop] for t in range(VOCABULARY) if t != stop}
    best = max(others, key=others.__getitem__)
    even = math.log(others[best] / first[stop]) / math.log(7 / 6)
    assert even > 0
    for penalty, expected in ((0.97 * even, ()), (1.03 * even, (best,))):
        batch = make_conversation_batch([asking("a", read)])
        options = {"beam": VOCABULARY, "length_penalty": penalty}
        (answer,) = answers(model, batch, [2], (stop,), **options)
        assert answer.tokens == expected


def test_classes_past_the_tokenizer_are_never_written():
    model = speech_llm()
    batch = make_conversation_batch(questions(4))
    result = answers(model, batch, [LIMIT] * 4, (), classes=11)
    assert all(token < 11 for item in result for token in item.tokens)


def test_no_conversation_has_no_answer():
    assert answers(speech_llm(), make_conversation_batch([]), [], STOPS) == []


def limit_of(number):
    return 3 + 5 * number % 11


PAGED = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])


@PAGED
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("slots", [1, 3, 5])
def test_slots_are_refilled(slots, beam, paged, monkeypatch):
    model = speech_llm("qwen2", seed=2)
    requested = questions(11)
    options = {"beam": beam, "length_penalty": 0.6}
    engine = ConversationEngine(model, STOPS, slots=slots, paged=paged, **options)
    rows, active = [], []
    logits = CachedConversations.logits

    def watched(cache):
        rows.append(len(cache.lengths))
        active.append(len(engine._active))
        return logits(cache)

    monkeypatch.setattr(CachedConversations, "logits", watched)
    result = {}
    for number in range(0, 11, 4):
        part = requested[number : number + 4]
        limits = [limit_of(number + n) for n in range(len(part))]
        engine.submit(make_conversation_batch(part), limits)
        result |= dict(engine.results(drain=False))
        assert len(engine.unfinished) <= slots
    result |= dict(engine.results())
    assert not engine.unfinished
    # All slots are taken while conversations wait, but those whose share is too small to admit.
    assert max(active) == slots
    assert max(rows) <= slots * beam
    assert len(rows) < sum(limit_of(number) for number in range(11)) or slots == 1
    monkeypatch.undo()
    for number, item in enumerate(requested):
        batch = make_conversation_batch([item])
        (alone,) = answers(model, batch, [limit_of(number)], STOPS, **options)
        assert result[item.id] == alone, number


def test_few_rows_are_read_together(monkeypatch):
    """A conversation that is longer than the limit is still read, alone."""
    monkeypatch.setattr(engine_module, "_ROWS_READ", 12)
    model = speech_llm()
    sizes = []
    admit = CachedConversations.admit

    def watched(cache, rows, x):
        sizes.append(x.layout.lengths)
        admit(cache, rows, x)

    monkeypatch.setattr(CachedConversations, "admit", watched)
    engine = ConversationEngine(model, (), slots=8)
    batch = make_conversation_batch([*questions(7), asking("long", [5] * 20)])
    engine.submit(batch, [2] * 8)
    assert len(dict(engine.results())) == 8
    assert sorted(n for lengths in sizes for n in lengths) == sorted(batch.token_lengths)
    assert all(len(lengths) == 1 or sum(lengths) <= 12 for lengths in sizes)
    assert max(batch.token_lengths) > 12
    assert max(map(len, sizes)) > 1


@pytest.mark.parametrize("beam", [1, 3])
def test_conversations_wait_for_pages(beam, monkeypatch):
    """Conversations with their answers take at most the pages that there are."""
    model = speech_llm("qwen2", seed=2)
    batch, limits = make_conversation_batch(questions(11)), [30 + 5 * n for n in range(11)]
    options = {"slots": 8, "beam": beam, "paged": True}
    free = ConversationEngine(model, (), **options)
    free.submit(batch, limits)
    expected = dict(free.results())
    needed = [most_pages(n, m - 1, beam) for n, m in zip(batch.token_lengths, limits, strict=True)]
    most = max(needed) + min(needed)
    engine = ConversationEngine(model, (), pages=most, **options)
    active, used = [], []
    read = CachedConversations.read

    def watched(cache, tokens):
        read(cache, tokens)
        active.append(len(engine._active))
        used.append(cache._cache.used)
        assert used[-1] <= sum(item.pages for item in engine._active) <= most

    monkeypatch.setattr(CachedConversations, "read", watched)
    engine.submit(batch, limits)
    assert dict(engine.results()) == expected
    assert 1 < max(active) < 8
    # The pool never had more pages, and none is lost.
    pool = engine._cache._cache
    assert max(used) <= pool.pages.shape[2] <= most
    assert not pool.used


def test_a_conversation_that_needs_more_pages_is_answered_alone():
    model = speech_llm()
    batch = make_conversation_batch([asking("short", [5] * 20), asking("long", [5] * 40)])
    expected = dict(zip(batch.ids, answers(model, batch, [2, 30], (), beam=2), strict=True))
    engine = ConversationEngine(model, (), slots=2, beam=2, paged=True, pages=3)
    engine.submit(batch, [2, 30])
    assert dict(engine.results()) == expected


def test_a_failed_step_loses_no_name(monkeypatch):
    engine = ConversationEngine(speech_llm(), (), slots=2)
    engine.submit(make_conversation_batch(questions(3)), [1, 4, 2], ["a", "b", "c"])

    def fail(cache, tokens):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(CachedConversations, "read", fail)
    with pytest.raises(torch.OutOfMemoryError):
        list(engine.results())
    assert engine.unfinished == ["a", "b", "c"]


def test_error_messages():
    for options in ({"slots": 0}, {"slots": 1, "beam": 0}, {"slots": 1, "pages": 0}):
        with pytest.raises(ValueError, match=f"`{[*options][-1]}` must be at least 1"):
            ConversationEngine(speech_llm(), STOPS, **options)
    with pytest.raises(ValueError, match="`limits`"):
        answers(speech_llm(), make_conversation_batch(questions(4)), [3, 0, 1, 1], STOPS)
