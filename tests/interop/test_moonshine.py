"""Moonshine here is transformers' Moonshine, of each utterance alone."""

import pytest
import torch

from effasr.data.batch import StaticShape
from effasr.data.collate import collate
from effasr.decoding.continuous_batching.engine import attention_greedy
from effasr.interop.huggingface.checkpoint import export_model, import_model
from effasr.interop.huggingface.files import SpecialTokens
from effasr.interop.huggingface.wav2vec2 import MOONSHINE, _permute
from effasr.interop.tables import export_weights
from effasr.model.asr import ASRModel
from tests.interop.whisper import spoken, transformers

BOS, EOS = 1, 2
TOKENS = SpecialTokens(pad_id=EOS, bos_id=BOS, eos_id=EOS, decoder_start_id=BOS)
# The shortest has one frame; some have samples that make no frame, but count for the norm.
LENGTHS = 9000, 895, 14_001, 1278, 20_000
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 2, "vocab_size": 220,
    "decoder_num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def make_moonshine(folder, **changes):
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.MoonshineConfig(**SIZES, **changes)
    model = transformers.MoonshineForConditionalGeneration(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.3 * torch.randn_like(x))
    model.save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(do_normalize=False).save_pretrained(folder)
    return model, ASRModel.from_state_dict(*import_model(folder)).eval()


def packed(model, examples, *, static=False):
    framing = model.config.features.framing
    shape = StaticShape(200, 80, 7, longest_frames=80, longest_tokens=40, framing=framing)
    return collate(examples, shape if static else None, eos_id=EOS, pad_id=EOS, framing=framing)


@pytest.mark.parametrize(("static", "tied"), [(False, True), (True, False)])
def test_logits_loss_gradients_and_the_way_back(tmp_path, static, tied):
    theirs, model = make_moonshine(tmp_path, tie_word_embeddings=tied)
    examples, total = spoken(LENGTHS, [BOS]), 0.0
    batch = packed(model, examples, static=static)
    logits = model.logits(model.decode(batch.tokens, model.encode(batch))[0])
    loss = model(batch).cross_entropy.sum()
    loss.backward()
    for example, start in zip(examples, batch.tokens.layout.cu_seqlens_host, strict=False):
        read = torch.tensor([example.prompt + example.text])
        out = theirs(torch.from_numpy(example.audio)[None], decoder_input_ids=read).logits[0]
        torch.testing.assert_close(logits[start : start + read.shape[1]], out, **CLOSE)
        targets = torch.tensor([*example.text, EOS])
        total = total + torch.nn.functional.cross_entropy(out, targets, reduction="sum")
    total.backward()
    assert loss.item() == pytest.approx(total.item(), rel=1e-5)
    ours = export_weights({name: x.grad for name, x in model.named_parameters()}, MOONSHINE)
    _permute(ours, model.config.encoder, inverse=True)
    for name, x in theirs.named_parameters():
        scale = max(1.0, x.grad.abs().max().item())
        torch.testing.assert_close(ours[name] / scale, x.grad / scale, **CLOSE)
    export_model(model, tmp_path / "back", TOKENS)
    back = type(theirs).from_pretrained(tmp_path / "back")
    assert back.config.rope_parameters == theirs.config.rope_parameters
    for name, value in theirs.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name


@torch.no_grad()
def test_transcripts_are_those_of_generate(tmp_path):
    theirs, model = make_moonshine(tmp_path)
    examples, expected = spoken(LENGTHS, [BOS]), []
    for example in examples:
        audio = torch.from_numpy(example.audio)[None]
        (tokens,) = theirs.generate(audio, max_new_tokens=20, do_sample=False).tolist()
        expected.append([token for token in tokens[1:] if token != EOS])
    assert len({tuple(tokens) for tokens in expected}) > 1
    encoded, prompts = model.encode(packed(model, examples)), [[BOS]] * len(examples)
    for slots in (len(examples), 2):
        ours = attention_greedy(model, encoded, prompts, [20] * len(prompts), EOS, slots=slots)
        assert [list(x.tokens) for x in ours] == expected
