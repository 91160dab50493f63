"""Phrase boosting: the tree, its files, and the searches with it."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from effasr.decoding.ctc_beam import ctc_beam
from effasr.decoding.ctc_greedy import CTCStreams, ctc_greedy
from effasr.decoding.lm.boosting import BoostTree, read_phrases
from effasr.decoding.transducer_greedy import TransducerStreams, transducer_greedy
from effasr.model.transducer import TransducerConfig
from effasr_kernels import pack
from tests.decoding.cases import (
    GIVEN,
    GivenLogits,
    assert_independent_of_batch,
    decode_all,
    gained,
    make_frames,
    make_head,
    transducer_model,
)

TOKENS = st.integers(0, 3)
WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 2.0])
PHRASES = st.dictionaries(
    st.lists(TOKENS, min_size=1, max_size=5).map(tuple), WEIGHTS, min_size=1, max_size=8
)


@given(PHRASES, st.lists(st.lists(TOKENS, min_size=12, max_size=12), min_size=1, max_size=4))
def test_a_path_gains_its_phrases_and_gives_back_the_others(phrases, texts) -> None:
    tree, columns = BoostTree(phrases, 4), torch.tensor(texts).T
    states, totals = torch.zeros(len(texts), dtype=torch.int64), torch.zeros(len(texts))
    every = torch.arange(4).expand(len(texts), -1)
    for count, symbols in enumerate(columns, 1):
        scores = tree.scores(states, every)
        torch.testing.assert_close(scores, tree.rows(states), rtol=0, atol=0)
        torch.testing.assert_close(scores[:, -1], tree.ends(states), rtol=0, atol=0)
        totals = totals + scores.gather(1, symbols[:, None])[:, 0]
        states = tree.advanced(states, symbols)
        assert torch.equal(tree.advanced(states, torch.full_like(states, -1)), states)
        assert torch.equal(tree.advanced(states, torch.full_like(states, 4)), states)
        ended = totals + tree.ends(states)
        expected = [gained(text[:count], phrases) for text in texts]
        torch.testing.assert_close(ended, torch.tensor(expected), rtol=0, atol=1e-4)
        assert float((-tree.ends(states)).max()) <= tree.largest


def logits_of(*frames: dict[int, float]) -> torch.Tensor:
    """Of 5 tokens and the blank, -9 but for these."""
    rows = torch.full((len(frames), 6), -9.0)
    for row, values in zip(rows, frames, strict=True):
        for symbol, value in values.items():
            row[symbol] = value
    return rows


BLANK = {5: 0.0}
SPELLED = logits_of({0: 0.0}, BLANK, {1: 0.0, 2: -1.0}, BLANK, {3: 0.0, 4: -1.0}, BLANK, {1: 0.0})
"""0 1 3 1; 0 2 4 1 is nearly as likely."""


@pytest.mark.parametrize("search", [
    lambda boost: ctc_greedy(GIVEN, pack([SPELLED]), 5, boost)[0],
    lambda boost: list(ctc_beam(GIVEN, pack([SPELLED]), 4, boost=boost)[0][0].tokens),
])  # fmt: skip
def test_ctc_recovers_a_phrase(search) -> None:
    assert search(None) == [0, 1, 3, 1]
    assert search(BoostTree({(0, 2, 4): 0.2}, 5)) == [0, 1, 3, 1]
    assert search(BoostTree({(0, 2, 4): 1.2}, 5)) == [0, 2, 4, 1]
    # A phrase that is not said changes nothing, although it begins alike.
    assert search(BoostTree({(0, 4, 2): 1.2}, 5)) == [0, 1, 3, 1]


@pytest.mark.parametrize("durations", [None, (0, 1, 2)])
@torch.no_grad()
def test_greedy_streams_are_the_whole_and_a_batch_the_single_ones(durations) -> None:
    config = TransducerConfig(predictor="lstm", width=8, joint=7, durations=durations)
    tree = BoostTree({(1, 2): 2.0, (2, 3, 1): 1.5, (0, 0): 1.0}, 5)
    lengths, changed = (12, 1, 0, 19), 0
    for seed in range(4):
        head, encoded = make_head(config, 5, seed, blank=1.5), make_frames(*lengths, seed=seed)
        draw = torch.Generator().manual_seed(seed)
        transducer = partial(transducer_greedy, head, max_symbols=10)
        given: Any = GivenLogits()
        given.vocab_size = 5
        logits = pack([2 * torch.randn(n, 6, generator=draw) for n in lengths])
        for whole, packed, streams in (
            (transducer, encoded, TransducerStreams(head, 4, 10, tree)),
            (partial(ctc_greedy, given, blank_id=5), logits, CTCStreams(given, 4, tree)),
        ):
            expected, rows = whole(encoded=packed, boost=tree), packed.unpack()
            changed += expected != whole(encoded=packed)
            assert expected == [whole(encoded=pack([row]), boost=tree)[0] for row in rows]
            texts: list[list[int]] = [[] for _ in rows]
            for slot in range(4):
                streams.start(slot)
            for at in range(0, max(lengths), 5):
                counts = [min(5, max(0, n - at)) for n in lengths]
                chunk = rows[0].new_zeros(4, 5, rows[0].shape[1])
                for slot, count in enumerate(counts):
                    chunk[slot, :count] = rows[slot][at : at + count]
                for text, emitted in zip(texts, streams.step(chunk, counts), strict=True):
                    text += [token for token, _ in emitted]
            assert texts == expected
    assert changed > 4, "the test needs texts that the phrases change"


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("method", ["attention", "ctc", "transducer", "tdt"])
def test_a_file_changes_texts_whatever_the_batch(
    method, beam, examples, model, tdt_model, tokenizer, tmp_path
) -> None:
    used = {"transducer": transducer_model("stateless", tokenizer), "tdt": tdt_model}
    used, options = used.get(method, model), {"method": method.replace("tdt", "transducer")}
    path = tmp_path / "phrases.txt"
    words = [piece[1:] for piece in tokenizer.pieces() if re.fullmatch("▁[a-z]+", piece)]
    path.write_text("".join(f"{word}\n" for word in words[::2]))
    weight = 4.0 if method == "attention" else 1.0
    options |= {"beam": beam, "boost": path, "boost_weight": weight}
    if method == "attention" and beam > 1:
        options["ctc_weight"] = 0.5
    result = assert_independent_of_batch(examples, used, tokenizer, **options)
    phrases = read_phrases(path, tokenizer, weight)
    unboosted = options | {"boost": None, "boost_weight": None}
    plain = decode_all(examples, used, tokenizer, **unboosted)
    assert sum(gained(item.tokens, phrases) for item in result) > sum(
        gained(item.tokens, phrases) for item in plain
    )


def test_spellings_of_a_phrase(tokenizer, tmp_path) -> None:
    path = tmp_path / "phrases.txt"
    lines = ["# names", "", "Three four", "five six \t 2.5", "いち", "three four\t0.5"]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    phrases = read_phrases(path, tokenizer, 1.5)
    encoded = {
        text: tuple(tokenizer.encode(text, language))
        for text, language in (("three four", "en"), ("five six", "en"), ("いち", "ja"))
    }
    assert phrases[encoded["three four"]] == 1.5
    assert phrases[encoded["five six"]] == 2.5
    # Within a text of a language without spaces, it has no mark of a word.
    pieces, marked = tokenizer.pieces(), encoded["いち"]
    spelled = {"".join(pieces[token] for token in tokens) for tokens in phrases}
    assert {"▁いち", "いち"} <= spelled
    assert phrases[marked] == 1.5
    assert not any(tokenizer.count_unknown(tokens) for tokens in phrases)


@pytest.mark.parametrize(("text", "message"), [
    ("# none\n", "FILE: must have at least one phrase: add one, or leave out `boost`"),
    ("one\none ω\n", "FILE:2: the tokenizer must be able to spell each phrase, but 'one ω' has"),
    ("one\tmuch\n", "FILE:1: the weight after the tab must be above 0, in nats a token, but is"),
    ("one\t0\n", "must be above 0, in nats a token, but is '0'"),
    ("one\t-1\n", "must be above 0, in nats a token, but is '-1'"),
    ("one\tinf\n", "must be above 0, in nats a token, but is 'inf'"),
    ("\tone\n", "FILE:1: must have a phrase before the tab"),
    (b"\xff\xfe", "FILE must be UTF-8, but is not"),
])  # fmt: skip
def test_error_messages(text, message, tokenizer, tmp_path) -> None:
    path = Path(tmp_path / "phrases.txt")
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=re.escape(message.replace("FILE", str(path)))):
        read_phrases(path, tokenizer, 1.0)
