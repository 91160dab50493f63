"""A tiny Whisper of transformers with random weights, its tokenizer and its features."""

import numpy as np
import pytest
import torch

from effasr.data.collate import Example

# Whoever imports this is skipped where these are missing.
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

SPECIALS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|yue|>", "<|translate|>"),
    *("<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
SECONDS = 2
"""Of the window that the model was made for."""


def make_tokenizer(specials=SPECIALS):
    """Bytes, a few merges, and the special tokens behind them; then timestamps."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["low middle high top"] * 4, trainer)
    added = [tokenizers.AddedToken(name, normalized=False, special=True) for name in specials]
    made.add_special_tokens(added)
    stamps = [f"<|{step / 50:.2f}|>" for step in range(50 * SECONDS + 1)]
    made.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in stamps])
    return made


def make_whisper(folder, **changes):
    """Write a checkpoint with all that belongs to it, and return the model."""
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    eos, start = (tokenizer.token_to_id(name) for name in SPECIALS[:2])
    sizes = {
        "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
        "max_source_positions": 50 * SECONDS, "max_target_positions": 40, "num_mel_bins": 80,
        "vocab_size": tokenizer.get_vocab_size(), "pad_token_id": eos, "bos_token_id": eos,
        "eos_token_id": eos, "decoder_start_token_id": start,
        "suppress_tokens": [1, 2, 7, *range(start, start + 9)], "begin_suppress_tokens": [220, eos],
    }  # fmt: skip
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.WhisperConfig(**{**sizes, **changes})
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
        # So that it says different things.
        model.model.decoder.embed_tokens.weight.mul_(8)
    model.generation_config.alignment_heads = [[0, 1], [1, 0]]
    model.generation_config.max_initial_timestamp_index = 50
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(chunk_length=SECONDS).save_pretrained(folder)
    return model


@torch.no_grad()
def make_timed_whisper(folder, latest_initial=None):
    """Write another one, and return it, whose texts have many timestamps.

    Their places depend on the audio, as its decoder sees more of positions than of tokens.
    """
    first = make_tokenizer().token_to_id("<|0.00|>")
    barred = [7, *range(EOS + 1, first)]
    model = make_whisper(folder, suppress_tokens=barred, begin_suppress_tokens=[220])
    model.model.decoder.embed_positions.weight.mul_(30)
    model.model.decoder.embed_tokens.weight.mul_(0.2)
    model.generation_config.no_timestamps_token_id = first - 1
    model.generation_config.max_initial_timestamp_index = latest_initial
    model.generation_config.is_multilingual = True
    model.save_pretrained(folder)
    return model


def spoken(lengths, prompt):
    """Noise of so many samples, each with another text."""
    random = np.random.default_rng(1)
    return [
        Example(
            str(number),
            (0.1 * random.standard_normal(samples)).astype(np.float32),
            prompt,
            random.integers(10, 200, 3 + number).tolist(),
        )
        for number, samples in enumerate(lengths)
    ]


EOS = make_tokenizer().token_to_id(SPECIALS[0])
