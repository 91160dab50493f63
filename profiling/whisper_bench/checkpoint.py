"""One random Whisper model in the formats that all systems read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from effasr.interop.huggingface.checkpoint import SpecialTokens, export_model, import_model
from effasr.model.asr import ASRModel
from whisper_bench.settings import CTRANSLATE2, Settings, Size

TEXT_TOKENS = 50_257
EOS = 50_257
PROMPT = (50_258, 50_259, 50_359, 50_363)
"""``<|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|>`` of multilingual models."""
_LANGUAGES = 99
_TIMESTAMPS = 1_501
_CLASSES = 51_865


def prepare(settings: Settings, systems: Sequence[str]) -> None:
    """Write the checkpoint of transformers, import it, export it again, and convert it.

    transformers then trains and decodes what effasr exported, so that a mistake on either way shows
    in the losses and tokens; here the exported weights must equal the first ones bit by bit.

    Args:
        settings: Settings with the folder and the model's size.
        systems: Systems that need the checkpoint; those of CTranslate2 need the package.

    Raises:
        ImportError: transformers is not installed, or CTranslate2 where it is needed.
        ValueError: The exported weights are not the imported ones.
    """
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = _random(settings.size)
    model.save_pretrained(settings.imported)
    extractor = transformers.WhisperFeatureExtractor(chunk_length=settings.size.window_s)
    extractor.save_pretrained(settings.imported)
    _write_tokenizer(settings.imported)
    config, classes, state = import_model(settings.imported)
    tokens = SpecialTokens(pad_id=EOS, bos_id=EOS, eos_id=EOS, decoder_start_id=PROMPT[0])
    export_model(ASRModel.from_state_dict(config, classes, state), settings.exported, tokens)
    _write_tokenizer(settings.exported)
    kind = transformers.WhisperForConditionalGeneration
    again = kind.from_pretrained(settings.exported).state_dict()
    for name, value in model.state_dict().items():
        if not torch.equal(value, again[name]):
            raise ValueError(f"{name} must be exported as it was imported, but differs.")
    for system in systems:
        if system in CTRANSLATE2:
            _convert(settings, system.removeprefix("ctranslate2_"))


def _random(size: Size) -> Any:
    """Return a model whose tokens depend on position and speech, like those of trained ones.

    With the weights that transformers draws, a decoder repeats one token whatever it reads, and all
    losses are the logarithm of the number of classes: no comparison could fail. Here products are
    about twice as large as what is multiplied.
    """
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=_CLASSES,
        d_model=size.width,
        encoder_layers=size.layers,
        decoder_layers=size.layers,
        encoder_attention_heads=size.heads,
        decoder_attention_heads=size.heads,
        encoder_ffn_dim=4 * size.width,
        decoder_ffn_dim=4 * size.width,
        max_source_positions=50 * size.window_s,
        pad_token_id=EOS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        decoder_start_token_id=PROMPT[0],
    )
    model: Any = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * (2 / size.width**0.5))
        model.get_decoder().embed_positions.weight.mul_(10.0)
    # Every system writes as many tokens as it is asked for: random weights end a text anywhere.
    model.generation_config.suppress_tokens = [EOS]
    model.generation_config.begin_suppress_tokens = []
    return model


def _write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the ids of Whisper's: bytes, meaningless words, and special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"word{index}" for index in range(len(words), TEXT_TOKENS)]
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    specials = [
        *("<|endoftext|>", "<|startoftranscript|>"),
        *(f"<|{language}|>" for language in list(LANGUAGES)[:_LANGUAGES]),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *("<|nospeech|>", "<|notimestamps|>"),
    ]
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    stamps = [f"<|{step / 50:.2f}|>" for step in range(_TIMESTAMPS)]
    made.add_tokens([AddedToken(name, normalized=False) for name in stamps])
    assert made.get_vocab_size() == _CLASSES
    made.save(str(folder / "tokenizer.json"))
    end = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    described = {"tokenizer_class": "WhisperTokenizer", **end}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def _convert(settings: Settings, compute_type: str) -> None:
    from ctranslate2.converters import TransformersConverter

    quantization = None if compute_type == "float32" else compute_type
    converter = TransformersConverter(str(settings.exported))
    converter.convert(str(settings.converted(compute_type)), quantization=quantization, force=True)
