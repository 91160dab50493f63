"""Runs that start from another model: with adapters, frozen parts or a tokenizer of their own."""

import gc
import weakref
from contextlib import nullcontext
from dataclasses import replace
from operator import itemgetter

import pytest
import safetensors.torch
import torch

from effasr.checkpoint import (
    CheckpointError,
    load_best,
    load_model,
    read_description,
    read_tokenizer,
    resolve,
    save_model,
)
from effasr.cli.main import main
from effasr.data.manifest.reader import read
from effasr.data.tokenizer import load_tokenizer, train_tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.tensor_files import read_whole
from effasr.evaluation.evaluate import evaluate
from effasr.model.asr import ASRModel
from effasr.model.text_encoder import TextEncoderConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.lora import LoRAConfig, adapters, merged
from effasr.training import build, validation
from effasr.training.checkpointing.averaging import average
from effasr.training.config import ASYNCHRONOUS, LoopConfig
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import train_step
from effasr.training.trainer import run
from effasr.training.weights import TOKEN_TABLES
from tests.support.run_ranks import train_on_ranks
from tests.training.conftest import LORA, published
from tests.training.test_exactness import assert_same_end


def is_adapted(name: str) -> bool:
    return name.rpartition(".")[0].endswith(("_proj", "linear1", "linear2"))


def test_a_run_publishes_merged_weights(make_lora_config, base, tmp_path, capsys):
    assert run(make_lora_config()) == 0
    before, after = published(base / "base"), published(tmp_path / "run")
    assert before.keys() == after.keys()
    for name, value in before.items():
        trained = (is_adapted(name) and name.endswith("weight")) or "norm" in name or "ctc" in name
        if "relative_k" in name or "running" in name or "tracked" in name:
            trained = "conv.norm" in name  # A batch norm that is trained counts.
        assert torch.equal(after[name], value) != trained, name
    assert "M trained), 1 x cpu" in capsys.readouterr().err
    state = read_whole(resolve(tmp_path / "run") / "training")
    trained_names = [name for name in state if name.startswith("trained/")]
    assert trained_names
    assert not any(name.endswith("_proj.weight") for name in trained_names)
    assert len([name for name in state if name.endswith("exp_avg")]) == len(trained_names)
    # The next run begins with merged weights.
    config = resolve_config(make_lora_config(name="next", init_from=str(tmp_path / "run")), None)
    size = read_description(resolve(tmp_path / "run")).vocab_size
    model = build.build_model(config, size, None, torch.device("cpu"))
    with merged(model):
        state = model.state_dict()
        assert [name for name, value in after.items() if not torch.equal(state[name], value)] == []
        # As it is decoded on a GPU.
        assert model.decoder is not None
        assert model.decoder.cast(torch.bfloat16).embed_tokens is not None
    plain = build.build_model(replace(config, lora=None), size, None, torch.device("cpu"))
    assert not adapters(plain)
    # Checkpoints can be averaged.
    paths = [tmp_path / "run" / "checkpoints" / f"step_{step:08d}" for step in (8, 12)]
    first, second = (load_model(path).model.state_dict() for path in paths)
    name = "encoder.layers.0.self_attn.qkv_proj.weight"
    assert not torch.equal(first[name], second[name])
    mean = average(paths).model.state_dict()[name]
    torch.testing.assert_close(mean, (first[name] + second[name]) / 2)


def test_validation_sees_what_the_checkpoint_gives(
    make_lora_config, base, tones, tmp_path, monkeypatch
):
    """Recognition while training is with merged weights, and leaves the adapters as they were."""
    seen = []

    class Watched(validation.Validator):
        def __call__(self, *args, **kwargs):
            seen.append({name: x.clone() for name, x in self._model.state_dict().items()})
            return super().__call__(*args, **kwargs)

    monkeypatch.setattr(validation, "Validator", Watched)
    data = {"validation": [str(tones / "test.jsonl")]}
    assert run(make_lora_config(data=data, training={"validate_every": 6})) == 0
    loaded = load_model(tmp_path / "run" / "checkpoints" / "step_00000012")
    untouched = load_model(resolve(base / "base"))
    lines = read_lines(tmp_path / "run" / "validation.jsonl")
    assert [line["step"] for line in lines] == [0, 6, 12]
    # The first is of the model before any step, which is published if no step makes it better.
    for number, model in ((0, untouched), (2, loaded)):
        assert seen[number].keys() == model.model.state_dict().keys()
        for name, value in model.model.state_dict().items():
            assert torch.equal(seen[number][name], value), name
        result = evaluate(model.model, model.tokenizer, list(read(data["validation"][0])))
        assert result.errors.wer == lines[number]["wer"]
    assert resolve(tmp_path / "run").name == f"step_{min(lines, key=itemgetter('wer'))['step']:08d}"


def test_a_file_that_lacks_half_an_adapter_is_refused(make_lora_config, tmp_path):
    assert run(make_lora_config(training={"max_steps": 1})) == 0
    path = resolve(tmp_path / "run")
    state = safetensors.torch.load_file(path / "model.safetensors")
    del state["encoder.layers.0.self_attn.o_proj.lora_b"]
    safetensors.torch.save_file(state, path / "model.safetensors")
    # Else the checksum would tell.
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"o_proj\.lora_a"):
        load_model(path)


def test_adapters_by_language_decode_together_and_export_each(
    make_by_language, tmp_path, caplog, capsys
):
    """Of a manifest of three languages; merged for one, that language is as it was."""
    manifest = f"{tmp_path}/spoken.jsonl"
    config = make_by_language(data={"validation": [manifest]}, training={"validate_every": 6})
    assert run(config) == 0
    assert "6 of 40 utterances are in languages without an adapter" in caplog.text
    loaded, cuts = load_best(tmp_path / "run"), list(read(manifest))
    assert loaded.model.config.language_adapters == ("en", "de")
    best = min(line["wer"] for line in read_lines(tmp_path / "run" / "validation.jsonl"))
    assert evaluate(loaded.model, loaded.tokenizer, cuts).errors.wer == best

    def texts_of(one):
        method = DecodingConfig(method="attention")
        result = evaluate(one.model, one.tokenizer, cuts, config=method)
        return {x.id: x.hypothesis for x in result.utterances}

    together, texts = texts_of(loaded), {}
    command = ["export", str(tmp_path / "run"), "", "--format", "effasr", "--merge-language"]
    for code in ("en", "de"):
        command[2] = str(tmp_path / code)
        assert main([*command, code]) == 0
        one = load_best(tmp_path / code)
        assert not adapters(one.model)
        texts[code] = texts_of(one)
    languages = {cut.id: cut.supervisions[0].language for cut in cuts}
    for name, code in languages.items():
        assert code == "fr" or together[name] == texts[code][name]
    assert texts["en"] != texts["de"]
    for name, message in (
        ("run", r"`init_from` must .* of en, de: .* --merge-language en"),
        ("en", ""),
    ):
        config = make_by_language(name="next", init_from=str(tmp_path / name))
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            resolve_config(config, None)
    command[2] = str(tmp_path / "fr")
    assert main([*command, "fr"]) == 2
    assert "`--merge-language` must be a language that has adapters (en, de), but is 'fr'" in (
        capsys.readouterr().err
    )
    assert "speech in 'fr' uses the weights without an adapter" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "adpsgd"])
@pytest.mark.extended
def test_two_processes_publish_merged_weights(make_lora_config, base, tones, tmp_path, strategy):
    data = {"validation": [str(tones / "test.jsonl")]}
    loop = {"strategy": strategy, "threads": 1, "max_steps": 6, "validate_first": False}
    if strategy == "adpsgd":
        loop["gossip"] = GossipConfig(learner_size=1)
    for stop_at in (4, None) if strategy == "fsdp2" else (None,):
        train_on_ranks(make_lora_config(data=data, training=loop | {"stop_at": stop_at}))
    before, after = published(base / "base"), published(tmp_path / "run")
    assert before.keys() == after.keys()
    changed = {name for name, value in before.items() if not torch.equal(after[name], value)}
    assert "encoder.layers.0.self_attn.qkv_proj.weight" in changed
    assert not any(name.endswith(("_proj.bias", "embed_tokens.weight")) for name in changed)
    lines = read_lines(tmp_path / "run" / "validation.jsonl")
    assert [line["step"] for line in lines] == [6]


def test_error_messages(make_lora_config, make_config, tones):
    text = TextEncoderConfig(layers=1, heads=2, feed_forward=16)
    model = replace(make_config().model, text_encoder=text)
    for config, message in (
        (make_lora_config(training={"freeze": ENCODER}), "`training.freeze` must be empty with"),
        (
            make_config(training={"freeze": ("encodr",)}),
            "`training.freeze` .*'encodr' .* did you",
        ),
        (make_config(lora=LORA), "`init_from` must be given with `lora`"),
        (
            make_lora_config(lora=LoRAConfig(targets=("*",))),
            "`lora.targets` must not match ctc",
        ),
        (make_lora_config(model=model), "`model.text_encoder` must be in `lora.also_train`"),
        (make_config(training={"freeze_steps": 3}), "`training.freeze_steps` has no effect unless"),
        (
            make_config(training=LOOP | {"strategy": ASYNCHRONOUS[0]}),
            r"`training.freeze_steps` must be null with .* adpsgd",
        ),
        (
            make_lora_config(lora=replace(LORA, by_language=("nl",))),
            "`lora.by_language` must name languages of the training data, but is nl",
        ),
        (
            make_lora_config(
                lora=replace(LORA, by_language=("en",), targets=("*relative_k_proj",))
            ),
            "`lora.by_language` must be empty to adapt encoder.layers.0.self_attn.relative_k",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(config)
    assert run(make_lora_config(training={"max_steps": 1})) == 0
    with pytest.raises(ValueError, match=r"`lora\.rank` must stay 3"):
        run(make_lora_config(lora=replace(LORA, rank=4), training={"max_steps": 2}))


ENCODER = ("encoder",)


def loop(*frozen: str, **settings) -> LoopConfig:
    return LoopConfig(max_steps=20, freeze=frozen, **settings)


def weights_of(folder, step: int) -> dict[str, torch.Tensor]:
    return load_model(folder / "checkpoints" / f"step_{step:08d}").model.state_dict()


def test_what_is_frozen_stays_to_the_bit_and_has_no_moments(make_config, tmp_path):
    training = {"freeze": ENCODER, "checkpoint_every": 1, "keep": 20}
    assert run(make_config(training=training)) == 0
    first, last = (weights_of(tmp_path / "run", step) for step in (1, 12))
    for name, value in last.items():
        # Running statistics of batch norms, too.
        assert torch.equal(first[name], value) == name.startswith(("encoder.", "features.")), name
    state = read_whole(tmp_path / "run" / "checkpoints" / "step_00000012" / "training")
    trained = [name for name in last if not name.startswith(("encoder.", "features."))]
    moments = [name for name in state if name.endswith("exp_avg")]
    assert len(moments) == len(trained)
    assert {name for name in state if name.startswith("trained/")} == {
        f"trained/{name}" for name in trained
    }
    with pytest.raises(ValueError, match=r"`training\.freeze` must stay"):
        run(make_config(training={"max_steps": 13}))


def test_frozen_batch_norms_use_their_running_statistics(make_train_state, batches):
    """So that the loss of an utterance depends on no other, though the rest is in training."""
    model, train_state = make_train_state(training=loop("encoder", "decoder"))
    before = [statistic.clone() for statistic in train_state.statistics]
    model.config = replace(
        model.config, spec_augment=replace(model.config.spec_augment, freq_masks=0)
    )
    with torch.no_grad():
        trained = model.encode(batches[0]).values
        frozen = model.eval().encode(batches[0]).values
    assert torch.equal(trained, frozen)
    model.train()
    train_step(train_state, batches[:2], 0)
    for statistic, value in zip(train_state.statistics, before, strict=True):
        assert torch.equal(statistic, value)


@pytest.mark.parametrize("recomputed", [False, True])
def test_nothing_is_kept_of_a_frozen_encoder(make_train_state, batches, recomputed):
    """What autograd saves is counted, with the hooks by which it says so."""
    selected = {}
    for frozen in ((), ENCODER):
        model, _ = make_train_state(training=loop(*frozen, activation_checkpointing=recomputed))
        seen: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}

        def pack(x, seen=seen, own=own):
            if x.untyped_storage().data_ptr() not in own:
                seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            encoded = model.encode(batches[0])
        selected[frozen] = sum(seen.values())
        assert encoded.values.requires_grad == (not frozen)
    assert selected[()] > 0
    assert selected[ENCODER] == 0


def test_activations_below_what_is_trained_are_freed_in_the_forward(make_train_state, batches):
    model, _ = make_train_state(training=loop("encoder.subsampling"))
    outputs = []
    hook = model.encoder.subsampling.pointwise2.register_forward_hook(
        lambda module, inputs, output: outputs.append(weakref.ref(output))
    )
    encoded = model.encode(batches[0])
    hook.remove()
    gc.collect()
    assert encoded.values.requires_grad
    assert outputs[0]() is None


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


@pytest.mark.parametrize("extends", [False, True])
def test_known_pieces_keep_their_weights_and_others_are_their_mean(
    start, other, make_config, tmp_path, extends
):
    model, folder = start
    if extends:
        other = tmp_path / "extended"
        texts, old = {"nl": TEXTS["nl"]}, read_tokenizer(folder)
        train_tokenizer(texts, other, vocab_size=28, extend=old)
    config = resolve_config(
        make_config(init_from=str(folder), data={"tokenizer": str(other)}, model=model.config), None
    )
    old, new = read_tokenizer(folder), find_tokenizer(config, None)
    assert new.languages == ("en", "nl")
    before, after = old.pieces(), new.pieces()
    existing = {piece for piece in after if piece in before}
    assert "▁low" in existing or "l" in existing
    assert {"<|endoftext|>", "<|en|>"} <= existing < set(after)
    spelled = {}
    for piece in set(after) - existing - set(new.specials):
        ids = old.encode(piece.replace("▁", " ").strip(), "en")
        if not old.count_unknown(ids):
            spelled[piece] = ids[before[ids[0]] == "▁" and piece[0] != "▁" :]
    assert len(spelled) > 1
    assert max(map(len, spelled.values())) > 1
    assert extends == (after[: old.vocab_size] == before)
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
            if piece in spelled:
                row = theirs[name][spelled[piece]].mean(0)
            if extends and number < old.vocab_size:
                row = theirs[name][number]
            assert torch.equal(value[number], row), (name, piece)
        # The blank, and TDT's durations.
        more = len(value) - new.vocab_size
        assert more == len(theirs[name]) - old.vocab_size
        assert torch.equal(value[new.vocab_size :], theirs[name][old.vocab_size :])


@pytest.mark.parametrize("before", ["ctc", "decoder"])
def test_only_the_outputs_of_both_models_are_read(start, other, make_config, before, caplog):
    """A CTC model of one with all outputs, or of one with a decoder alone, such as Whisper."""
    model, folder = start
    if before == "decoder":
        fields = {"ctc": False, "transducer": None, "text_encoder": None}
        model = ASRModel(replace(model.config, **fields), model.vocab_size)
        save_model(folder, model, read_tokenizer(folder))
    fields = {"ctc": True, "decoder": None, "transducer": None, "text_encoder": None}
    settings = {"init_from": str(folder), "data": {"tokenizer": str(other)}}
    config = make_config(**settings, model=replace(model.config, **fields))
    new = find_tokenizer(config, None)
    result = build.build_model(config, new.vocab_size, None, CPU).state_dict()
    for name, value in result.items():
        if name.startswith("encoder."):
            assert torch.equal(value, model.state_dict()[name]), name
    assert {name.partition(".")[0] for name in result} == {"encoder", "ctc_head"}
    head = result["ctc_head.weight"]
    assert head.shape == (new.vocab_size + 1, head.shape[1])
    # One that is new begins with equal scores.
    assert bool(head.any()) == (before == "ctc")
    assert f"and of the outputs {'ctc' if before == 'ctc' else 'none'}" in caplog.text


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


LOOP = {"freeze": ("encoder", "ctc_head"), "freeze_steps": 5, "checkpoint_every": 1, "keep": 20}


def checkpoint(folder, step: int):
    return folder / "checkpoints" / f"step_{step:08d}"


def test_what_was_frozen_is_trained_after_its_steps(make_config, tones, tmp_path, capsys):
    data = {"validation": str(tones / "test.jsonl")}
    loop = LOOP | {"validate_every": 5, "max_steps": 8, "tensorboard": True}
    assert run(make_config(name="whole", data=data, training=loop)) == 0
    shown = capsys.readouterr().err
    assert "step 5: training.freeze ends" in shown
    assert "stopped" not in shown
    weights = {
        step: load_model(checkpoint(tmp_path / "whole", step)).model.state_dict()
        for step in (1, 5, 8)
    }
    frozen = [name for name in weights[1] if name.startswith(LOOP["freeze"])]
    assert all(torch.equal(weights[1][name], weights[5][name]) for name in frozen)
    changed = [name for name in frozen if not torch.equal(weights[5][name], weights[8][name])]
    # All but fixed buffers.
    assert len(changed) > 0.9 * len(frozen)
    counts = [
        sum(
            name.endswith("exp_avg")
            for name in read_whole(checkpoint(tmp_path / "whole", step) / "training")
        )
        for step in (4, 6)
    ]
    assert 0 < counts[0] < counts[1]
    # Stopped before, at and after that step, it ends the same.
    for stop_at in (3, 5, 6):
        assert run(make_config(data=data, training=loop | {"stop_at": stop_at})) == 0
        assert f"stopped at step {stop_at}; the same command" in capsys.readouterr().err
    assert run(make_config(data=data, training=loop)) == 0
    assert_same_end(tmp_path / "whole", tmp_path / "run", steps=8)


def test_a_freeze_of_the_whole_run_puts_off_no_validation(make_config, tones, tmp_path, capsys):
    data = {"validation": str(tones / "test.jsonl")}
    for steps in (5, 6):
        assert run(make_config(data=data, training=LOOP | {"max_steps": steps})) == 0
        assert "done: " in capsys.readouterr().err
        validated = read_lines(tmp_path / "run" / "validation.jsonl")
        assert validated[-1]["step"] == steps


def test_moments_of_the_others_go_on(make_config, tmp_path, monkeypatch):
    """Without anything to learn for the frozen part, the others train as if nothing had changed."""
    made, alive = [], []

    def build_model(*arguments):
        # Nothing of the first model may take memory beside the second.
        alive.append([model() for model in made])
        model = original(*arguments)
        made.append(weakref.ref(model))
        return model

    original = build.build_model
    monkeypatch.setattr(build, "build_model", build_model)
    assert run(make_config(training=LOOP | {"max_steps": 6})) == 0
    before, after = (
        torch.load(checkpoint(tmp_path / "run", step) / "training.pt", weights_only=True)[
            "optimizer"
        ]
        for step in (5, 6)
    )
    steps = sorted(float(row["step"]) for row in after["state"].values())
    assert steps[0] == 1
    assert steps[-1] == 6
    assert steps.count(6) == len(before["state"])
    assert alive == [[], [None]]


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "local_sgd"])
def test_ranks_unfreeze_together(make_config, tmp_path, strategy):
    loop = LOOP | {"max_steps": 7, "strategy": strategy, "log_every": 1}
    train_on_ranks(make_config(training=loop))
    assert checkpoint(tmp_path / "run", 7).is_dir()
    changed = [load_model(checkpoint(tmp_path / "run", n)).model.state_dict() for n in (5, 7)]
    name = next(name for name in changed[0] if name.startswith("ctc_head"))
    assert not torch.equal(changed[0][name], changed[1][name])
