"""The readers of further kinds of models: a valid input of each, and how it is read.

| reader | what it reads | limits, checked before memory is taken |
| --- | --- | --- |
| nemo_rnnt, nemo_canary, nemo_hybrid | .nemo of these models | as nemo |
| canary, parakeet_rnnt, parakeet_tdt, whisper | config.json, safetensors | as huggingface |
| tokenizer_parts | vocab.json, merges.txt, added_tokens.json | 64 MiB each |
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.security.model_readers import (
    NEMO,
    SLACK_BYTES,
    import_nemo,
    use_huggingface,
    use_tokenizer,
)
from tests.security.reader import Reader


def _nemo(kind: str) -> Reader:
    def make(folder: Path) -> object:
        content = (NEMO / f"{kind}.nemo").read_bytes()
        # Unpacked, so that mutations find the tar.
        is_packed = content.startswith(b"\x1f\x8b")
        return (folder / "model.nemo").write_bytes(
            gzip.decompress(content) if is_packed else content
        )

    return Reader(make, lambda folder: import_nemo(folder / "model.nemo"), SLACK_BYTES)


def _exported(**parts: Any) -> Reader:
    def make(folder: Path) -> object:
        from effasr.data.features.config import FeatureConfig
        from effasr.interop.huggingface.checkpoint import export_model
        from effasr.model.asr import ASRModel
        from effasr.model.config import ModelConfig
        from effasr.model.decoder import DecoderConfig
        from effasr.model.encoder import FastConformerConfig
        from effasr.model.transducer import TransducerConfig

        encoder = FastConformerConfig(
            width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4
        )
        decoder = DecoderConfig(**parts["decoder"]) if "decoder" in parts else None
        transducer = TransducerConfig(**parts["transducer"]) if "transducer" in parts else None
        config = ModelConfig(
            features=FeatureConfig(mel_bins=16), encoder=encoder, decoder=decoder,
            transducer=transducer, ctc=False,
        )  # fmt: skip
        return export_model(ASRModel(config, 21), folder)

    return Reader(make, use_huggingface)


def _whisper(folder: Path) -> None:
    from tests.interop.whisper import make_whisper

    make_whisper(folder, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16)


def _use_whisper(folder: Path) -> object:
    return use_huggingface(folder), use_tokenizer(folder)


def _tokenizer_parts(folder: Path) -> None:
    from tests.interop.whisper import make_tokenizer

    whole = json.loads(make_tokenizer().to_str())
    (folder / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    added = {token["content"]: token["id"] for token in whole["added_tokens"]}
    (folder / "added_tokens.json").write_text(json.dumps(added))


_SIZES = {"width": 16, "joint": 16}
FOREIGN_MODELS = {
    "nemo_rnnt": _nemo("rnnt"),
    "nemo_canary": _nemo("canary"),
    "nemo_hybrid": _nemo("hybrid"),
    "canary": _exported(decoder={"width": 16, "layers": 1, "heads": 2, "feed_forward": 16}),
    "parakeet_rnnt": _exported(transducer=_SIZES),
    "parakeet_tdt": _exported(transducer=_SIZES | {"durations": (0, 1, 2)}),
    "whisper": Reader(_whisper, _use_whisper),
    "tokenizer_parts": Reader(_tokenizer_parts, use_tokenizer),
}
