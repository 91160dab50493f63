"""BEST-RQ: codes, masks, and the loss against an independent computation."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.data.features.log_mel import normalized
from effasr.model.asr import ASRModel
from effasr.model.best_rq import BestRQConfig, RandomQuantizer, draw_spans
from effasr.model.config import ModelConfig
from effasr.model.cost import best_rq_cost, cost_model
from effasr.model.encoder import FastConformerConfig
from effasr.model.learning_cost import learning_cost
from effasr.model.whisper_encoder import WhisperEncoderConfig
from effasr_kernels import PackedLayout

SMALL = BestRQConfig(codebooks=2, codes=12, code_width=4, span_s=0.16)
FASTCONFORMER = FastConformerConfig(
    width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4, conv_norm="layer_norm"
)
WHISPER = WhisperEncoderConfig(width=16, layers=1, heads=2, feed_forward=16)
WHISPER_MEL = FeatureConfig(
    kind="whisper", n_fft=400, window=400, preemphasis=0.0, normalize=False, mel_bins=16
)
CONFIGS = {
    "fastconformer": ModelConfig(encoder=FASTCONFORMER, decoder=None, best_rq=SMALL),
    "transformer": ModelConfig(encoder=WHISPER, features=WHISPER_MEL, decoder=None, best_rq=SMALL),
}


def waves(count, seed=0):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(5_000, 24_000, size=count)
    return [generator.normal(size=int(size)).astype(np.float32) for size in sizes]


def batch_of(audio, config, *, static=False):
    examples = [Example(str(number), item, [], None) for number, item in enumerate(audio)]
    framing = config.features.framing
    shape = StaticShape(700, 1, len(audio) + 3, framing=framing) if static else None
    return collate(examples, shape, eos_id=0, pad_id=0, framing=framing)


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    return ASRModel(CONFIGS[request.param], 1)


def codes_of(model, audio, **options):
    """The codes of each utterance, (K, frames)."""
    batch = batch_of(audio, model.config, **options)
    codes = model.best_rq.codes(model.features(batch.audio, batch.frames))
    return list(codes[:, : batch.frames.total].split(batch.frames.lengths[: len(audio)], 1))


def test_codes_do_not_depend_on_packing_or_order(model):
    audio = waves(6)
    alone = [codes_of(model, [item])[0] for item in audio]
    together = codes_of(model, audio)
    static = codes_of(model, audio, static=True)
    backwards = codes_of(model, audio[::-1])[::-1]
    halves = [*codes_of(model, audio[:2]), *codes_of(model, audio[2:])]
    for other in (together, static, backwards, halves):
        for codes, result in zip(alone, other, strict=True):
            torch.testing.assert_close(result, codes, rtol=0, atol=0)
    assert len(torch.cat(alone, 1)[0].unique()) > 6


def test_codes_are_the_nearest_of_the_codebook():
    quantizer = RandomQuantizer(SMALL, 24)
    frames = np.random.default_rng(0).normal(size=(300, 24))
    # On the grid of the quantizer, so that nothing is rounded.
    frames = np.rint(frames * 32) / 32
    result = quantizer(torch.tensor(frames, dtype=torch.float32)).numpy()
    projection, codes = quantizer.projection.numpy(), quantizer.codes.numpy()
    for book in range(SMALL.codebooks):
        projected = frames @ projection[book]
        projected /= np.linalg.norm(projected, axis=1, keepdims=True)
        units = codes[book] / np.linalg.norm(codes[book], axis=1, keepdims=True)
        distances = ((projected[:, None] - units[None]) ** 2).sum(-1)
        nearest = distances.min(1)
        # Norms of rounded codes differ in the third digit.
        assert (distances[np.arange(len(frames)), result[book]] <= nearest + 0.02).all()
        assert (result[book] == distances.argmin(1)).mean() > 0.97


def test_the_seed_gives_the_codebooks_and_the_weights_no_part_of_it():
    first, again = RandomQuantizer(SMALL, 24), RandomQuantizer(SMALL, 24)
    other = RandomQuantizer(dataclasses.replace(SMALL, seed=1), 24)
    assert first.projection.equal(again.projection)
    assert first.codes.equal(again.codes)
    assert not first.codes.equal(other.codes)
    assert not first.state_dict()
    assert first.half().codes.dtype == torch.int32
    norms = first.codes.double().norm(dim=-1)
    torch.testing.assert_close(norms, torch.full_like(norms, 256.0), rtol=0.01, atol=0)


def test_spans_cover_the_expected_share_and_every_sequence():
    torch.manual_seed(0)
    layout = PackedLayout.from_lengths([3000, 0, 1, 2, 500], rows=3600, num_sequences=7)
    share, span = 0.33, 5
    begins = 1 - (1 - share) ** (1 / span)
    masks = torch.stack([draw_spans(layout, span, begins) for _ in range(40)])
    assert not masks[:, layout.total :].any()
    assert masks[:, :3000].float().mean().item() == pytest.approx(share, abs=0.02)
    for begin, end in ((0, 3000), (3000, 3001), (3001, 3003), (3003, 3503)):
        assert masks[:, begin:end].any(1).all()
    # A span ends with its sequence: what follows is masked as often as any first frame.
    assert masks[:, 3003].float().mean() < 0.4


def test_the_loss_is_that_of_masked_frames(model):
    model.eval()
    batch = batch_of(waves(3), model.config, static=True)
    best_rq, generator = model.best_rq, torch.random.get_rng_state()
    losses = model(batch)
    torch.random.set_rng_state(generator)
    mel = model.features(batch.audio, batch.frames)
    values, masked = best_rq.mask(mel, mel.values)
    untouched = ~masked.repeat_interleave(mel.subsampling) | ~mel.mask
    assert values[untouched].equal(mel.values[untouched])
    assert values[~untouched].std().item() == pytest.approx(SMALL.noise, rel=0.2)
    encoded = model.encoder(mel.with_values(values))
    codes = best_rq.codes(mel)
    begin, expected = 0, []
    for length in batch.frames.lengths[:3]:
        rows = torch.arange(begin, begin + length)[masked[begin : begin + length]]
        parts = [
            torch.nn.functional.cross_entropy(head(encoded.values[rows]), codes[book, rows])
            for book, head in enumerate(best_rq.heads)
        ]
        expected.append(length * sum(parts) / len(parts))
        begin += length
    expected = torch.stack(expected)
    torch.testing.assert_close(losses.per_utterance[:3], expected, rtol=1e-5, atol=1e-5)
    assert not losses.per_utterance[3:].any()
    torch.testing.assert_close(losses.cross_entropy, expected.sum(), rtol=1e-5, atol=1e-5)
    assert batch.num_targets == batch.num_frames


def test_every_parameter_learns_and_an_empty_batch_gives_zero_gradients(model):
    model.train()
    model(batch_of(waves(3), model.config)).cross_entropy.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()
    empty = collate(
        [], StaticShape(20, 1, 2, framing=model.config.features.framing), eos_id=0, pad_id=0
    )
    loss = model(empty).cross_entropy
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_codes_are_counted_in_training_alone(model):
    batch = batch_of(waves(3), model.config, static=True)
    model.eval()
    model(batch)
    assert not model.best_rq.code_counts.any()
    model.train()
    model(batch)
    assert model.best_rq.code_counts.sum(1).tolist() == [batch.num_frames] * SMALL.codebooks


def test_features_without_normalisation_are_normalised_for_the_codes():
    torch.manual_seed(0)
    model = ASRModel(CONFIGS["transformer"], 1)
    audio = waves(2)
    louder = [np.float32(0.5) * item for item in audio]
    same = [
        (item == other).float().mean()
        for item, other in zip(codes_of(model, audio), codes_of(model, louder), strict=True)
    ]
    assert min(same) > 0.9
    batch = batch_of(audio, model.config)
    assert normalized(model.features(batch.audio, batch.frames)).abs().mean() > 0.5


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_what_torch_counts(name):
    config = CONFIGS[name]
    model = ASRModel(config, 1).eval()
    batch = batch_of(waves(1), config)
    mel = model.features(batch.audio, batch.frames)
    encoded = model.encoder(mel)
    masked = torch.ones(batch.frames.rows, dtype=torch.bool)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.best_rq(mel, masked, encoded)
    assert counter.get_total_flops() == best_rq_cost(config) * batch.frames.rows
    without = dataclasses.replace(config, best_rq=None, ctc=True)
    difference = cost_model(config, 1).frame - cost_model(without, 1).frame
    assert difference == best_rq_cost(config) - 2 * 16 * 2
    assert learning_cost(model) == cost_model(config, 1)
    model.encoder.requires_grad_(False)
    assert learning_cost(model).frame < cost_model(config, 1).frame
