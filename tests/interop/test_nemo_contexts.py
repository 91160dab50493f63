"""NeMo's cache-aware streaming encoders: what their options mean, out and in again."""

from dataclasses import replace

import pytest
import torch

from effasr.data.features.config import FeatureConfig
from effasr.data.tokenizer import train_tokenizer
from effasr.interop.nemo.archive import read_archive
from effasr.interop.nemo.checkpoint import export_nemo, import_nemo
from effasr.interop.nemo.config import read_contexts, read_convolution, write_contexts
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr_kernels import Context
from tests.interop.test_nemo import batch_of, model_of
from tests.support.small_model import shake


def _seen_by_nemo(rows, left, right, style):
    """The rule of `ConformerEncoder._create_masks`: bool (rows, rows), query by key."""
    seen = torch.ones(rows, rows, dtype=torch.bool)
    if style == "regular":
        seen = seen.triu(-left) if left >= 0 else seen
        return seen.tril(right) if right >= 0 else seen
    if right == -1:
        return seen.triu(-left) if left >= 0 else seen
    chunk = torch.arange(rows) // (right + 1)
    apart = chunk[:, None] - chunk[None]
    chunks = left // (right + 1) if left >= 0 else 10_000
    return (apart <= chunks) & (apart >= 0)


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize(
    ("size", "style"),
    [
        ([70, 13], "chunked_limited"),
        ([14, 6], "chunked_limited"),
        ([4, 0], "chunked_limited"),
        ([-1, 3], "chunked_limited"),
        ([6, -1], "chunked_limited"),
        ([8, 4], "regular"),
        ([3, 0], "regular"),
        ([-1, 2], "regular"),
        ([5, -1], "regular"),
    ],
)
def test_a_context_hides_what_nemos_hides(size, style, rows):
    (context,) = read_contexts(size, style)
    hidden = context.hidden(rows, torch.device("cpu"))
    assert torch.equal(~hidden, _seen_by_nemo(rows, *size, style))


@pytest.mark.parametrize(
    ("size", "style"),
    [
        ([-1, -1], "regular"),
        ([70, 13], "chunked_limited"),
        ([[70, 13], [70, 6], [70, 0]], "chunked_limited"),
        ([8, 4], "regular"),
        ([[8, 4], [-1, 2]], "regular"),
    ],
)
def test_contexts_are_written_as_they_are_read(size, style):
    written = write_contexts(read_contexts(size, style))
    assert written == {"att_context_size": size, "att_context_style": style}


def test_what_nemo_has_not_is_not_written():
    assert write_contexts([Context(5, 0, 3)]) is None
    assert write_contexts([Context(6, 1, 3)]) is None
    assert read_contexts(None, "regular") == read_contexts([[-1, -1]], "regular") == ()
    assert read_convolution("causal", 9)
    assert read_convolution([8, 0], 9)
    assert not read_convolution([4, 4], 9)
    with pytest.raises(ValueError, match="must have whole chunks of 3 frames on the left"):
        read_contexts([4, 2], "chunked_limited")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer({"en": ["the red dog ran", "a cat"]}, folder, vocab_size=20)


@pytest.mark.parametrize("norm", ["layer_norm", "batch_norm"])
@torch.no_grad()
def test_a_streaming_model_goes_out_and_comes_back(tokenizer, tmp_path, norm):
    contexts = Context(6, 0, 3), Context(4, 0, 2), Context(None, 0, 1)
    encoder = FastConformerConfig(
        width=16,
        layers=2,
        heads=2,
        feed_forward=32,
        subsampling_channels=6,
        conv_kernel=5,
        conv_norm=norm,
        context=contexts,
        causal_convolution=True,
        causal_subsampling=True,
    )
    features = FeatureConfig(normalize=False)
    config = ModelConfig(features=features, encoder=encoder, decoder=None, ctc=True)
    torch.manual_seed(0)
    ours = ASRModel(config, tokenizer.vocab_size).eval()
    shake(ours)
    path = tmp_path / "streaming.nemo"
    export_nemo(ours, tokenizer, path)
    archive = read_archive(path)
    told = archive.config["encoder"]
    assert told["att_context_size"] == [[6, 2], [4, 1], [-1, 0]]
    assert told["att_context_style"] == "chunked_limited"
    assert told["conv_context_size"] == "causal"
    assert told["causal_downsampling"] is True
    # 80 bands: 41, 21 and 11, where the symmetric ones leave 10.
    assert archive.weights["encoder.pre_encode.out.weight"].shape == (16, 6 * 11)
    found = import_nemo(path)
    assert found.config.encoder == replace(encoder, input_dropout=0.0)
    batch = batch_of(framing=config.features.framing)
    theirs = model_of(found)
    for context in contexts:
        for one in (ours, theirs):
            one.encoder.evaluate_with(context)
        torch.testing.assert_close(theirs.encode(batch).values, ours.encode(batch).values)


def test_other_contexts_are_refused(tokenizer, tmp_path):
    encoder = FastConformerConfig(
        width=16, layers=1, heads=2, feed_forward=32, context=(Context(4, 0, 3),)
    )
    model = ASRModel(ModelConfig(encoder=encoder, decoder=None, ctc=True), tokenizer.vocab_size)
    with pytest.raises(ValueError, match=r"NeMo has no encoder\.context with `right` and chunks"):
        export_nemo(model, tokenizer, tmp_path / "other.nemo")
