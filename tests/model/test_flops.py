"""The floating-point work of a training step, counted by torch and by hand."""

import pytest
from torch.utils.flop_counter import FlopCounterMode


@pytest.fixture(scope="module", params=[8, 4])
def subsampling(request):
    return request.param


def _linear(rows, inputs, outputs, *, inputs_learn=True):
    """A matrix product and its gradients: to the weight, and to the inputs where they learn."""
    return 2 * rows * inputs * outputs * (3 if inputs_learn else 2)


def _subsampling(config, bins, rows, frames):
    channels = config.subsampling_channels
    if config.subsampling == 4:
        # 3 x 3 taps at 2 x F/2 places of a frame, and again at 1 x F/4.
        stem = 2 * 9 * channels * frames * (2 * (bins // 2) + bins // 4)
        return (
            3 * stem
            + _linear(rows * (bins // 4), channels, channels)
            + _linear(rows, channels * (bins // 4), config.width)
        )
    # The stem: 3 x 3 taps at 4 x F/2 places of a frame, and again at 2 x F/4.
    stem = 2 * 9 * channels * frames * (4 * (bins // 2) + 2 * (bins // 4))
    depthwise = 2 * 9 * channels * frames * (bins // 8)
    return (
        3 * (stem + depthwise)
        + _linear(rows * 2 * (bins // 4), channels, channels)
        + _linear(rows * (bins // 8), channels, channels)
        + _linear(rows, channels * (bins // 8), config.width)
    )


def _encoder_layer(config, rows, lengths, reach):
    width = config.width
    pairs = sum(length**2 for length in lengths)
    return (
        2 * 2 * _linear(rows, width, config.feed_forward)
        + _linear(rows, width, 3 * width)
        + _linear(2 * reach - 1, width, width, inputs_learn=False)
        # Content, position and values: three products for each pair.
        + 3 * (3 * 2 * pairs * width)
        + _linear(rows, width, width)
        + _linear(rows, width, 2 * width)
        + 3 * (2 * sum(lengths) * width * config.conv_kernel)
        + _linear(rows, width, width)
    )


def _decoder_layer(config, rows, tokens, frame_rows, frames):
    width = config.width
    inner = config.heads * config.head_dim
    causal = sum(length * (length + 1) // 2 for length in tokens)
    cross = sum(u * t for u, t in zip(tokens, frames, strict=True))
    return (
        _linear(rows, width, 3 * inner)
        + _linear(rows, inner, width)
        + _linear(rows, width, inner)
        + _linear(frame_rows, width, 2 * inner)
        + _linear(rows, inner, width)
        # Scores and values: two products for each pair.
        + 3 * (2 * 2 * inner * (causal + cross))
        + 2 * _linear(rows, width, config.feed_forward)
    )


def test_torch_counts_what_a_hand_counts(tiny_model, examples, make_batch):
    batch = make_batch(examples, static=True)
    with FlopCounterMode(display=False) as counter:
        losses = tiny_model(batch, label_smoothing=0.1, guided_sigma=0.3)
        (losses.cross_entropy + losses.ctc + losses.guided).backward()

    model, config = tiny_model, tiny_model.config
    encoder, decoder = config.encoder, config.decoder
    bins, rows = config.features.mel_bins, batch.frames.rows
    frames, tokens = batch.frames.lengths, batch.tokens.layout.lengths
    token_rows = batch.tokens.layout.rows
    reach = (
        model.encoder._embeddings(batch.frames, next(model.parameters()).dtype).shape[0] // 2 + 1
    )
    # Features: the power spectrum into bands, which learns nothing.
    by_hand = 2 * rows * config.encoder.subsampling * (config.features.n_fft // 2 + 1) * bins
    by_hand += _subsampling(encoder, bins, rows, sum(frames))
    by_hand += encoder.layers * _encoder_layer(encoder, rows, frames, reach)
    by_hand += _linear(sum(frames), encoder.width, model.vocab_size + 1)
    by_hand += _linear(rows, encoder.width, decoder.width)
    by_hand += decoder.layers * _decoder_layer(decoder, token_rows, tokens, rows, frames)
    by_hand += _linear(batch.num_targets, decoder.width, model.vocab_size)
    assert counter.get_total_flops() == by_hand
