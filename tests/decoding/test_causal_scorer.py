"""Log-probabilities of texts against those of transformers, with random weights."""

import pytest
import torch
import transformers

from effasr.decoding.second_pass.causal_scorer import CausalScorer
from tests.support.chat_folder import write_chat_model

TEXTS = [
    ("", "hello world"),
    ("what is said here", "the cat sat"),
    ("", "the"),
    ("the cat sat on the mat", "and what is said here, there and everywhere"),
    ("hello", ""),
    ("", ""),
]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request, tmp_path_factory):
    torch.manual_seed(1)
    return write_chat_model(tmp_path_factory.mktemp(request.param), request.param)


@torch.no_grad()
def test_scores_are_sums_of_transformers_log_probabilities(folder) -> None:
    scorer = CausalScorer(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval().float()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    result = scorer.log_probs(TEXTS)
    for (before, own), value in zip(TEXTS, result, strict=True):
        read = tokenizer.encode(before, add_special_tokens=False)
        message = tokenizer.encode(f" {own}" if before and own else own, add_special_tokens=False)
        ids = torch.tensor([[tokenizer.eos_token_id, *read, *message]])
        steps = theirs(input_ids=ids).logits[0].double().log_softmax(-1)
        places = range(len(read), len(read) + len(message))
        expected = sum(float(steps[n, ids[0, n + 1]]) for n in places)
        assert value == pytest.approx(expected, abs=1e-4)
        assert (value < 0) == bool(own)
    few = CausalScorer(folder, row_budget=12).log_probs(TEXTS[::-1])[::-1]
    assert few == pytest.approx(result, abs=1e-5)
    assert scorer.log_probs([]) == []


def test_one_packed_forward_reads_all_texts(folder, monkeypatch) -> None:
    scorer, calls = CausalScorer(folder), []
    forward = scorer._forward
    monkeypatch.setattr(scorer, "_forward", lambda rows: calls.append(len(rows)) or forward(rows))
    scorer.log_probs(TEXTS)
    assert calls == [len(TEXTS)]


def test_context_is_cut_to_the_positions(tmp_path) -> None:
    torch.manual_seed(1)
    scorer = CausalScorer(write_chat_model(tmp_path, max_position_embeddings=24))
    long = " ".join(["the cat sat on the mat hello world what is said here user"] * 3)
    ids, scored = scorer.token_ids((long, "the mat"))
    assert len(ids) == 24
    whole = scorer._encoded(long)
    assert ids[1:-scored] == whole[len(whole) - (23 - scored) :]
    with pytest.raises(ValueError, match="`second_lm` must have room"):
        scorer.log_probs([("", " ".join(["xyz"] * 30))])


def test_folders_without_a_tokenizer_or_start_are_refused(tmp_path) -> None:
    folder = write_chat_model(tmp_path / "a")
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="`bos_token` or an `eos_token`"):
        CausalScorer(folder)
    with (folder / "vocab.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(ValueError, match=r"vocab\.json must have at most 67108864 bytes"):
        CausalScorer(folder)
    (folder / "vocab.json").unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="must have a tokenizer of transformers"):
        CausalScorer(folder)
    with pytest.raises(ValueError, match=r"config\.json"):
        CausalScorer(tmp_path)
