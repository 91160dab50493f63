"""Runs that start from a model whose tokenizer is replaced."""

from dataclasses import replace

import pytest
import torch

from effasr.checkpoint import load_model, read_tokenizer, resolve, save_model
from effasr.data.tokenizer import load_tokenizer, train_tokenizer
from effasr.model.asr import ASRModel
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.lora import LoRAConfig
from effasr.training import build
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.trainer import run
from effasr.training.weights import TOKEN_TABLES, shared_pieces

CPU = torch.device("cpu")
TEXTS = {
    "nl": ["hoog laag top", "midden low op", "top laag"],
    "en": ["low middle", "high top low", "middle high", "top low"] * 9,
}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A tokenizer of two languages, one of which the model has."""
    folder = tmp_path_factory.mktemp("other") / "tokenizer"
    train_tokenizer(TEXTS, folder, vocab_size=28)
    return folder


@pytest.fixture
def start(tones, model_config, tmp_path):
    """A model with every table of tokens, and where it is."""
    torch.manual_seed(0)
    tdt = TransducerConfig(predictor="lstm", width=16, layers=1, joint=16, durations=(0, 1, 2))
    config = replace(model_config, transducer=tdt, text_encoder=TextEncoderConfig(heads=2))
    config = replace(
        config, decoder=replace(config.decoder, tie_embeddings=False, output_bias=True)
    )
    tokenizer = load_tokenizer(tones / "tokenizer")
    model = ASRModel(config, tokenizer.vocab_size)
    with torch.no_grad():
        # No row is as another, nor as one that is initialised.
        for parameter in model.parameters():
            parameter.normal_()
    save_model(tmp_path / "model", model, tokenizer)
    return model, tmp_path / "model"


def test_known_pieces_keep_their_weights_and_others_are_initialised(start, other, make_config):
    model, folder = start
    config = resolve_config(
        make_config(init_from=str(folder), data={"tokenizer": str(other)}, model=model.config), None
    )
    old, new = read_tokenizer(folder), find_tokenizer(config, None)
    assert new.languages == ("en", "nl")
    before, after = old.pieces(), new.pieces()
    existing = {piece for piece in after if piece in before}
    assert "▁low" in existing or "l" in existing
    assert {"<|endoftext|>", "<|en|>"} <= existing < set(after)
    result = build.build_model(config, new.vocab_size, None, CPU).state_dict()
    drawn = build.build_model(replace(config, init_from=None), new.vocab_size, None, CPU)
    theirs, initial = model.state_dict(), drawn.state_dict()
    assert set(TOKEN_TABLES) <= result.keys()
    for name, value in result.items():
        if name not in TOKEN_TABLES:
            assert torch.equal(value, theirs[name]), name
            continue
        for number, piece in enumerate(after):
            row = theirs[name][before.index(piece)] if piece in existing else initial[name][number]
            assert torch.equal(value[number], row), (name, piece)
        # The blank, and TDT's durations.
        more = len(value) - new.vocab_size
        assert more == len(theirs[name]) - old.vocab_size
        assert torch.equal(value[new.vocab_size :], theirs[name][old.vocab_size :])


def test_the_same_tokenizer_changes_nothing(start, other, tones, make_config):
    model, folder = start
    settings = {"init_from": str(folder), "model": model.config}
    for tokenizer in ("", str(tones / "tokenizer")):
        config = make_config(**settings, data={"tokenizer": tokenizer})
        result = build.build_model(config, model.vocab_size, None, CPU).state_dict()
        assert all(torch.equal(result[name], value) for name, value in model.state_dict().items())
    # A piece of two languages stays where it is.
    of_two = load_tokenizer(other)
    pieces = of_two.pieces()
    assert len(set(pieces)) < len(pieces)
    assert shared_pieces(of_two, of_two) == {n: n for n in range(len(pieces))}


def test_a_run_goes_on_with_the_new_tokenizer(make_config, other, tmp_path, caplog):
    assert run(make_config(name="first", training={"max_steps": 2})) == 0
    first = {"init_from": str(tmp_path / "first"), "data": {"tokenizer": str(other)}}
    assert run(make_config(**first, training={"max_steps": 4, "stop_at": 2})) == 0
    assert "the tokenizer of init_from is replaced: the model keeps its weights for" in caplog.text
    caplog.clear()
    assert run(make_config(**first, training={"max_steps": 4})) == 0
    assert "is replaced" not in caplog.text
    loaded = load_model(resolve(tmp_path / "run"))
    assert loaded.tokenizer.languages == ("en", "nl")
    assert loaded.model.vocab_size == loaded.tokenizer.vocab_size


def test_what_would_never_be_trained_is_refused(start, other, make_config):
    model, folder = start
    settings = {"init_from": str(folder), "data": {"tokenizer": str(other)}, "model": model.config}
    config = make_config(**settings, lora=LoRAConfig(also_train=("*norm*",)))
    size = load_tokenizer(other).vocab_size
    with pytest.raises(
        ValueError, match=r"`model\.ctc_head\.weight` must be in .* set lora\.also_train="
    ) as refused:
        build.build_model(config, size, None, CPU)
    named = str(refused.value).rpartition("[")[2].removesuffix("].").split(",")
    accepted = make_config(**settings, lora=LoRAConfig(also_train=tuple(named)))
    build.build_model(accepted, size, None, CPU)
    decoder = replace(model.config.decoder, suppress=(1,))
    settings["model"] = replace(model.config, decoder=decoder)
    with pytest.raises(ValueError, match=r"`data\.tokenizer` must be left out where the decoder"):
        build.build_model(make_config(**settings), size, None, CPU)
