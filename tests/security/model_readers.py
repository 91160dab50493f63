"""The readers of models and recipes: a valid input of each, and how it is read.

| reader | what it reads | limits, checked before memory is taken |
| --- | --- | --- |
| nemo | .nemo: tar, YAML, weights, tokenizer | 10,000 files, 64 MiB each and 256 MiB together beside the weights; unpacks to 20 times its size; plain tensors |
| nemo_folder | the same as a folder | as nemo |
| nemo_streaming | model_config.yaml of a cache-aware model, used on a stream | as nemo; contexts |
| huggingface | config.json, safetensors | JSON 64 MiB, depth 64, no key twice; shards in the folder alone |
| tokenizer_json | tokenizer.json | 64 MiB |
| tokenizer_own, tokenizer_nemo | SentencePiece models and their JSON | 64 MiB each, in the folder alone |
| model_directory | model.yaml, safetensors, tokenizer | YAML 4 MiB, depth 64, 500,000 values after aliases |
| checkpoint | a run's checkpoints | checksums; uncompressed; plain tensors |
| checkpoint_forged | the same after a change with checksums to match | names of files in the folder; values that the files hold |
| recipe, decoding | YAML | as model_directory |
"""  # noqa: E501

from __future__ import annotations

import json
import shutil
import tarfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.security.reader import Reader

RATE = 16_000
SLACK_BYTES = 192 << 20
"""Of archives: a file of 64 MiB may be packed, and is held about twice while it is read."""
NEMO = Path(__file__).parents[1] / "interop" / "nemo"


@lru_cache
def _model() -> Any:
    from effasr.data.features.config import FeatureConfig
    from effasr.model.asr import ASRModel
    from effasr.model.config import ModelConfig
    from effasr.model.encoder import FastConformerConfig

    encoder = FastConformerConfig(
        width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4
    )
    return ASRModel(
        ModelConfig(features=FeatureConfig(mel_bins=16), encoder=encoder, decoder=None, ctc=True),
        21,
    )


@lru_cache
def _tokenizer(folder: str) -> Any:
    from effasr.data.tokenizer import train_tokenizer

    text = ["the quick brown fox jumps over the lazy dog", "a large fawn jumped quickly"] * 20
    return train_tokenizer({"en": text}, folder, vocab_size=40)


def _own_tokenizer(folder: Path) -> None:
    _tokenizer(str(folder.with_name("own"))).save(folder)


def _nemo_tokenizer(folder: Path) -> None:
    from effasr.data.tokenizer import NeMoTokenizer

    models = _tokenizer(str(folder.with_name("own"))).models
    NeMoTokenizer({"en": models["en"], "de": models["en"]}).save(folder)


def _tokenizer_json(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"the": 0, "fox": 1, "<unk>": 2, "<pad>": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def use_tokenizer(folder: Path) -> object:
    from effasr.data.tokenizer import load_tokenizer

    found = load_tokenizer(folder)
    language = found.languages[0] if found.languages else "en"
    return found.decode(found.encode("the quick fox", language)[:50])


def _huggingface(folder: Path) -> None:
    from effasr.interop.huggingface.checkpoint import export_model

    export_model(_model(), folder)


def use_huggingface(folder: Path) -> object:
    from effasr.interop.huggingface.checkpoint import import_model
    from effasr.model.asr import ASRModel

    return ASRModel.from_state_dict(*import_model(folder))


def _model_directory(folder: Path) -> None:
    from effasr.checkpoint import save_model
    from effasr.model.asr import ASRModel

    tokenizer = _tokenizer(str(folder.with_name("own")))
    save_model(folder, ASRModel(_model().config, tokenizer.vocab_size), tokenizer)


def _use_model_directory(folder: Path) -> object:
    from effasr.checkpoint import load_model

    return load_model(folder)


def _checkpoint(folder: Path) -> None:
    import torch

    from effasr.training.checkpointing.run_checkpoints import RunCheckpoints

    tokenizer = _tokenizer(str(folder.with_name("own")))
    from effasr.model.asr import ASRModel

    model = ASRModel(_model().config, tokenizer.vocab_size)
    state = {"step": 1, "moment": torch.arange(3.0), "config": {"betas": [0.9, 0.98]}}
    moments = {"optimizer/0/exp_avg": torch.ones(4, 3), "trained/bias": torch.zeros(5)}
    RunCheckpoints(folder, keep=1).save(1, model, tokenizer, state, moments)


def _use_checkpoint(folder: Path) -> object:
    from effasr.checkpoint import load_model
    from effasr.distributed.tensor_files import read_whole
    from effasr.training.checkpointing.run_checkpoints import TENSORS, RunCheckpoints

    newest = RunCheckpoints(folder, keep=1).newest()
    return newest and (load_model(newest[0]), read_whole(newest[0] / TENSORS))


def _use_forged_checkpoint(folder: Path) -> object:
    """Read a checkpoint after its checksums are made to match: they are no protection."""
    from effasr.checkpoint import MANIFEST
    from effasr.data.checksums import checksum

    for path in folder.glob("step_*"):
        files = [one for one in path.rglob("*") if one.is_file() and one.name != MANIFEST]
        sums = {str(one.relative_to(path)): checksum(one) for one in files}
        # A mutation may have made a link of it, through which this would write.
        if (path / MANIFEST).is_file() and not (path / MANIFEST).is_symlink():
            (path / MANIFEST).write_text(json.dumps({"step": 1, "files": sums}))
    return _use_checkpoint(folder)


def _nemo_folder(folder: Path) -> None:
    with tarfile.open(NEMO / "ctc.nemo") as tar:
        tar.extractall(folder, filter="data")


def import_nemo(path: Path) -> Any:
    from effasr.interop.nemo.checkpoint import import_nemo
    from effasr.model.asr import ASRModel

    found = import_nemo(path)
    return ASRModel.from_state_dict(found.config, found.vocab_size, found.state)


def _nemo_streaming(folder: Path) -> None:
    from effasr.data.features.config import FeatureConfig
    from effasr.interop.nemo.checkpoint import export_nemo
    from effasr.model.asr import ASRModel
    from effasr.model.config import ModelConfig
    from effasr.model.encoder import FastConformerConfig
    from effasr_kernels import Context

    encoder = FastConformerConfig(
        width=16, layers=1, heads=2, feed_forward=32, subsampling_channels=4, conv_kernel=5,
        conv_norm="layer_norm", context=(Context(6, 0, 3), Context(4, 0, 2)),
        causal_convolution=True, causal_subsampling=True,
    )  # fmt: skip
    features = FeatureConfig(normalize=False)
    config = ModelConfig(features=features, encoder=encoder, decoder=None, ctc=True)
    tokenizer = _tokenizer(str(folder.with_name("own")))
    export_nemo(ASRModel(config, tokenizer.vocab_size), tokenizer, folder / "packed.nemo")
    with tarfile.open(folder / "packed.nemo") as tar:
        tar.extractall(folder, filter="data")
    (folder / "packed.nemo").unlink()


def _use_nemo_streaming(folder: Path) -> object:
    from effasr.transcription.online import OnlineRecognizer

    model = import_nemo(folder).eval()
    recognizer = OnlineRecognizer(model, _tokenizer(str(folder.with_name("own"))))
    stream = recognizer.open()
    stream.feed(np.zeros(RATE, np.float32))
    stream.finish()
    return recognizer.decode()


def _recipe(folder: Path) -> None:
    from effasr.config import RECIPES

    shutil.copy(RECIPES / "demo.yaml", folder / "recipe.yaml")


def _use_recipe(folder: Path) -> object:
    from effasr.config import load
    from effasr.training.config import TrainConfig

    return load(TrainConfig, folder / "recipe.yaml")


def _decoding(folder: Path) -> None:
    from effasr.decoding.config import DecodingConfig
    from effasr.evaluation.tuning.decoding_file import write_decoding

    write_decoding(folder / "decoding.yaml", DecodingConfig(beam=4, length_penalty=0.6), "x")


def _use_decoding(folder: Path) -> object:
    from effasr.decoding.config import DecodingConfig
    from effasr.evaluation.tuning.decoding_file import read_decoding

    return DecodingConfig(**read_decoding(folder / "decoding.yaml", {}))


MODEL_READERS = {
    "nemo": Reader(
        lambda folder: (folder / "model.nemo").write_bytes((NEMO / "ctc.nemo").read_bytes()),
        lambda folder: import_nemo(folder / "model.nemo"),
        SLACK_BYTES,
    ),
    "nemo_folder": Reader(_nemo_folder, import_nemo),
    "nemo_streaming": Reader(_nemo_streaming, _use_nemo_streaming),
    "huggingface": Reader(_huggingface, use_huggingface),
    "tokenizer_json": Reader(_tokenizer_json, use_tokenizer),
    "tokenizer_own": Reader(_own_tokenizer, use_tokenizer),
    "tokenizer_nemo": Reader(_nemo_tokenizer, use_tokenizer),
    "model_directory": Reader(_model_directory, _use_model_directory, SLACK_BYTES),
    # It puts a `latest` right that is damaged.
    "checkpoint": Reader(_checkpoint, _use_checkpoint, writes=True),
    "checkpoint_forged": Reader(_checkpoint, _use_forged_checkpoint, SLACK_BYTES, writes=True),
    "recipe": Reader(_recipe, _use_recipe),
    "decoding": Reader(_decoding, _use_decoding),
}
