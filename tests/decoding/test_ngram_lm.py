import gzip
import math
from pathlib import Path

import pytest
import torch

from effasr.decoding.lm.ngram import TokenNgrams, load_ngrams
from effasr_kernels import pack
from tests.decoding.cases import GIVEN, ctc_texts, decode_all
from tests.decoding.cases import best_ctc_beam as ctc_beam

V, EOS = 6, 5
ARPA = """
\\data\\
ngram 1=6
ngram 2=4
ngram 3=2

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.30
-0.8\t</s>
-0.6\t0\t-0.25
-0.7\t1\t-0.10
-0.9\t2

\\2-grams:
-0.2\t<s> 0\t-0.40
-0.3\t0 1\t-0.15
-0.5\t1 </s>
-0.4 1 2 -0.2

\\3-grams:
-0.1\t<s> 0 1
-0.05\t0 1 2

\\end\\
"""


@pytest.fixture
def path(tmp_path) -> Path:
    made = tmp_path / "lm.arpa"
    made.write_text(ARPA)
    return made


def _log10(model: TokenNgrams, context, token: int) -> float:
    provided = torch.tensor(context, dtype=torch.int64).reshape(1, 1, -1)
    scores = model.scores(provided, torch.tensor([[[token]]]))
    assert scores.shape == (1, 1, 2)
    end = model.scores(provided, torch.tensor([[[EOS]]]))
    assert scores[0, 0, 1] == end[0, 0, 0]
    return float(scores[0, 0, 0]) / math.log(10)


@pytest.mark.parametrize(
    ("context", "token", "expected"),
    [
        ([], 0, -0.2),
        ([-1, -1], 0, -0.2),
        ([], 1, -0.30 - 0.7),
        ([0], 1, -0.1),
        ([-1, 0], 1, -0.1),
        ([0], 2, -0.40 - 0.25 - 0.9),
        ([0, 1], 2, -0.05),
        ([2, 0, 1], 2, -0.05),
        ([0, 1], EOS, -0.15 - 0.5),
        ([2, 0], 1, -0.3),
        ([1, 2], 0, -0.2 - 0.6),
        ([2, 2], EOS, -0.8),
        ([2, 2], 4, -1.5),
        ([0, 1], 4, -0.15 - 0.10 - 1.5),
    ],
)
def test_scores_back_off_to_shorter_contexts(context, token, expected, path) -> None:
    assert _log10(load_ngrams(path, V, EOS), context, token) == pytest.approx(expected)


def test_many_contexts_at_a_time_and_gzip(path, tmp_path) -> None:
    model = load_ngrams(path, V, EOS)
    packed = tmp_path / "lm.arpa.gz"
    packed.write_bytes(gzip.compress(ARPA.encode()))
    contexts = torch.tensor([[[-1, -1, 0], [2, 0, 1]], [[-1, -1, -1], [1, 2, 2]]])
    symbols = torch.tensor([[[0, 1], [2, 4]], [[0, 3], [1, 0]]])
    scores = load_ngrams(packed, V, EOS).scores(contexts, symbols)
    assert scores.dtype == torch.float64
    for n in range(2):
        for k in range(2):
            for c in range(2):
                alone = _log10(model, contexts[n, k].tolist(), int(symbols[n, k, c]))
                assert float(scores[n, k, c]) == pytest.approx(alone * math.log(10))


def test_a_model_without_unknown_words_all_but_forbids_them(path) -> None:
    path.write_text(ARPA.replace("-1.5\t<unk>\n", "").replace("1=6", "1=5"))
    assert _log10(load_ngrams(path, V, EOS), [2, 2], 4) == pytest.approx(-100)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        ("0 1 2", "0 1 ▁the", r"lm.arpa:23: `▁the` must be a token id below 6: estimate"),
        ("0 1 2", "0 1 6", r"`6` must be a token id below 6"),
        ("ngram 2=4", "ngram 2=5", r"promises \[6, 5, 2\] n-grams, but there are \[6, 4, 2\]"),
        ("\\end\\", "", r"from \\data\\ to \\end\\, but ends in \\3-grams:"),
        ("-0.7\t1\t-0.10", "0.7\t1\t-0.10", r"lm.arpa:12 must be a log-probability, 1 words"),
        ("-0.7\t1\t-0.10", "-0.7", "must be a log-probability, 1 words"),
        ("ngram 1=6", "ngrams 1=6", "must be like `ngram 1=120`, but is `ngrams 1=6`"),
        ("\\3-grams:", "\\trigrams", r"`\\trigrams` is no section"),
        (ARPA, "", "but ends in no section"),
        (ARPA, "\ufffd\0", "but ends in no section"),
    ],
)
def test_what_is_no_model_of_tokens_is_refused(old, new, match, path) -> None:
    assert old in ARPA
    path.write_text(ARPA.replace(old, new))
    with pytest.raises(ValueError, match=match):
        load_ngrams(path, V, EOS)


def test_binary_files_are_refused(tmp_path) -> None:
    for name in ("lm.arpa", "lm.arpa.gz"):
        path = tmp_path / name
        path.write_bytes(b"mmap lm \xff\xfe\x00\x81")
        with pytest.raises(ValueError, match="must be an ARPA file, plain or"):
            load_ngrams(path, V, EOS)


@pytest.mark.parametrize("weight", [0.3, 1.5])
def test_a_wide_beam_of_ctc_finds_the_best_joint_score(weight, path) -> None:
    """Against all transcripts of tokens 0 to 3; the blank is 4."""
    model = load_ngrams(path, V, EOS)
    draw = torch.Generator().manual_seed(0)
    encoded = pack([1.5 * torch.randn(length, 5, generator=draw) for length in (4, 0, 5, 3, 1)])
    result = ctc_beam(GIVEN, encoded, 500, model, weight)
    changed = 0
    for message, frames in zip(result, encoded.unpack(), strict=True):
        ranks = ctc_texts(frames)
        likeliest = max(ranks, key=ranks.__getitem__)
        for text in ranks:
            tokens = [*text, EOS]
            steps = [_log10(model, tokens[:n], token) for n, token in enumerate(tokens)]
            ranks[text] += weight * sum(steps) * math.log(10)
        assert ranks[tuple(message)] == pytest.approx(max(ranks.values()))
        changed += tuple(message) != likeliest
    assert changed, "the test needs a text that the language model changes"


@pytest.mark.parametrize(
    "options", [{"beam": 1}, {"beam": 4, "ctc_weight": 0.3}, {"beam": 4, "method": "ctc"}]
)
def test_a_strong_language_model_changes_what_is_said(
    options, examples, model, tokenizer, tmp_path
) -> None:
    """It allows three tokens alone."""
    path = tmp_path / "lm.arpa"
    grams = "-99 <s>\n-2 </s>\n-0.5 20\n-0.5 21\n-0.5 22\n"
    path.write_text(f"\\data\\\nngram 1=5\n\n\\1-grams:\n{grams}\n\\end\\\n")
    with_lm = {**options, "lm": path, "lm_weight": 10.0}
    results = decode_all(examples, model, tokenizer, **with_lm)
    assert results != decode_all(examples, model, tokenizer, **options)
    # What the decoder finds too unlikely to be a candidate cannot be said.
    if options.get("method") == "ctc":
        assert any(result.tokens for result in results)
        assert {token for result in results for token in result.tokens} <= {20, 21, 22}
    alone = [decode_all([example], model, tokenizer, **with_lm)[0] for example in examples]
    assert alone == results
