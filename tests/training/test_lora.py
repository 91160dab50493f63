"""Runs that train adapters beside the weights of another model."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch

from effasr.checkpoint import CheckpointError, load_model, read_description, resolve
from effasr.data.manifest.reader import read
from effasr.distributed.async_sgd.gossip.config import GossipConfig
from effasr.distributed.tensor_files import read_whole
from effasr.evaluation.evaluate import evaluate
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn.lora import LoRAConfig, adapters, merged
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.adascale import AdaScaleConfig
from effasr.training import build, validation
from effasr.training.checkpointing.averaging import average
from effasr.training.config import LoopConfig
from effasr.training.resolve import resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import train_step
from effasr.training.trainer import run
from tests.support.run_ranks import train_on_ranks
from tests.training.conftest import LORA, published
from tests.training.shortage import shortage

FAST = OptimizerConfig(lr=0.02)


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


def test_validation_sees_what_the_checkpoint_gives(make_lora_config, tones, tmp_path, monkeypatch):
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
    assert len(seen) == 2
    assert seen[1].keys() == loaded.model.state_dict().keys()
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(seen[1][name], value), name
    result = evaluate(loaded.model, loaded.tokenizer, list(read(data["validation"][0])))
    (_, line) = read_lines(tmp_path / "run" / "validation.jsonl")
    assert result.errors.wer == line["wer"]


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


@pytest.mark.parametrize(
    "settings",
    [
        {"training": LoopConfig(max_steps=20, activation_checkpointing=True, ema_decay=0.9)},
        {"optimizer": OptimizerConfig(lr=0.02, adascale=AdaScaleConfig(scale=4.0))},
        {"optimizer": OptimizerConfig(name="lamb", lr=0.02)},
    ],
    ids=["checkpointing", "adascale", "lamb"],
)
def test_it_trains_with_all_else(make_lora_config, make_train_state, batches, base, settings):
    if settings.get("optimizer", FAST).name == "lamb":
        pytest.importorskip("pytorch_optimizer")
    data = make_lora_config().data
    model, train_state = make_train_state(
        **{"optimizer": FAST} | settings, lora=LORA, init_from=str(base / "base"), data=data
    )
    begun = {name: x.clone() for name, x in model.state_dict().items()}
    for step in range(3):
        report = train_step(train_state, batches[2 * step : 2 * step + 2], step)
        assert report.read()["finite"]
    for name, value in model.state_dict().items():
        if "lora_" in name:
            assert torch.equal(begun[name], value) == name.endswith("scale"), name
        elif is_adapted(name):
            assert torch.equal(begun[name], value), name


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_want_of_memory_is_made_good(make_lora_config, make_train_state, batches, base, where):
    config = make_lora_config(replace(LORA, dropout=0.0), optimizer=OptimizerConfig(lr=1e-3))
    settings = {"lora": config.lora, "init_from": config.init_from, "data": config.data}
    model, train_state = make_train_state(**settings)
    with shortage(model, 1, where=where):
        report = train_step(train_state, batches[:2], 0)
    assert (report.read()["finite"], report.read()["splits"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "adpsgd"])
@pytest.mark.extended
def test_two_processes_publish_merged_weights(make_lora_config, base, tones, tmp_path, strategy):
    data = {"validation": [str(tones / "test.jsonl")]}
    gossip = GossipConfig(learner_size=1)
    loop = {"strategy": strategy, "gossip": gossip, "threads": 1, "max_steps": 6, "stop_at": 4}
    whole = loop | {"stop_at": None}
    for training in (loop, whole) if strategy == "fsdp2" else (whole,):
        train_on_ranks(make_lora_config(data=data, training=training))
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
        (
            make_lora_config(training={"freeze": ("encoder",)}),
            "`training.freeze` must be empty with",
        ),
        (make_config(lora=LORA), "`init_from` must be given with `lora`"),
        (make_lora_config(LoRAConfig(targets=("*",))), "`lora.targets` must not match ctc_head"),
        (make_lora_config(model=model), "`model.text_encoder` must be in `lora.also_train`"),
    ):
        with pytest.raises(ValueError, match=message):
            run(config)
    assert run(make_lora_config(training={"max_steps": 1})) == 0
    with pytest.raises(ValueError, match=r"`lora\.rank` must stay 3"):
        run(make_lora_config(replace(LORA, rank=4), training={"max_steps": 2}))
