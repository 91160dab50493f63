"""Runs in which parts of the model are not trained."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from effasr.checkpoint import load_model
from effasr.distributed.tensor_files import read_whole
from effasr.training.config import LoopConfig
from effasr.training.step import train_step
from effasr.training.trainer import run

ENCODER = ("encoder",)


def loop(*frozen: str, **settings) -> LoopConfig:
    return LoopConfig(max_steps=20, freeze=frozen, **settings)


def weights(folder, step: int) -> dict[str, torch.Tensor]:
    return load_model(folder / "checkpoints" / f"step_{step:08d}").model.state_dict()


def test_what_is_frozen_stays_to_the_bit_and_has_no_moments(make_config, tmp_path):
    training = {"freeze": ENCODER, "checkpoint_every": 1, "keep": 20}
    assert run(make_config(training=training)) == 0
    first, last = (weights(tmp_path / "run", step) for step in (1, 12))
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


def test_error_messages(make_config):
    message = r"`training\.freeze` .*'encodr' .* did you mean 'encoder'"
    with pytest.raises(ValueError, match=message):
        run(make_config(training={"freeze": ("encodr",)}))
    assert run(make_config(training={"freeze": ENCODER, "max_steps": 1})) == 0
    with pytest.raises(ValueError, match=r"`training\.freeze` must stay"):
        run(make_config())
