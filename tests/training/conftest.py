import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from effasr import config as configuration
from effasr.checkpoint import load_model, resolve
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.config import DataConfig
from effasr.data.features.spec_augment import SpecAugmentConfig
from effasr.data.mixture import MixConfig
from effasr.data.tokenizer import NeMoTokenizer, train_tokenizer
from effasr.data.tokenizer.nemo import _NEEDED, SPECIAL
from effasr.distributed.process_group import DistributedContext
from effasr.interop.nemo.tokenizer import _special_model
from effasr.model.asr import ASRModel
from effasr.model.best_rq import BestRQConfig
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.text_encoder import TextEncoderConfig
from effasr.nn.lora import LoRAConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training import build
from effasr.training.config import LoopConfig, TeacherConfig, TrainConfig
from effasr.training.loss import LossConfig
from effasr.training.resolve import resolve_config
from effasr.training.run_dir.run_log import ProgressDisplay
from effasr.training.step import TrainState
from effasr.training.trainer import run
from tests.support.talks import model_mapping, talks_config, write_folders

VOCABULARY = 12


@pytest.fixture
def model_config() -> ModelConfig:
    """A model with every kind of randomness and of state that training must handle."""
    return ModelConfig(
        encoder=FastConformerConfig(
            width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4,
            residual_dropout=0.1, attention_dropout=0.1,
        ),
        decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16, residual_dropout=0.1),
        ctc=True,
    )  # fmt: skip


def without_randomness(config: ModelConfig, **encoder) -> ModelConfig:
    none = {"residual_dropout": 0.0, "attention_dropout": 0.0}
    return replace(
        config,
        spec_augment=SpecAugmentConfig(),
        encoder=replace(config.encoder, **none, **encoder),
        decoder=replace(config.decoder, **none),
    )


@pytest.fixture
def make_train_state(model_config) -> Callable[..., tuple[ASRModel, TrainState]]:
    def make(**settings) -> tuple[ASRModel, TrainState]:
        defaults = {"model": model_config, "training": LoopConfig(max_steps=20)}
        return built(TrainConfig(**defaults | settings))

    return make


def built(config: TrainConfig, vocab_size: int = VOCABULARY) -> tuple[ASRModel, TrainState]:
    config = resolve_config(config, None)
    context = DistributedContext(0, 1, torch.device("cpu"))
    model = build.build_model(config, vocab_size, None, context.device)
    return model, build.build_train_state(config, model, context)


def make_batch(number: int, *, broken: bool = False) -> Batch:
    generator = np.random.default_rng(number)
    examples = [
        Example(
            id=f"{number}-{n}",
            audio=generator.normal(size=int(generator.integers(8_000, 16_000))).astype(np.float32),
            prompt=[2, 3],
            text=generator.integers(4, VOCABULARY, size=3).tolist(),
            monotonic=n != 1,
        )
        for n in range(3)
    ]
    if broken:
        examples[2].audio[100] = np.nan
    return collate(examples, StaticShape(60, 30, 4), eos_id=1, pad_id=0)


@pytest.fixture(scope="session")
def batches() -> list[Batch]:
    return [make_batch(number) for number in range(6)]


@pytest.fixture(scope="session")
def broken_batch() -> Batch:
    return make_batch(9, broken=True)


WORDS = {"low": 300.0, "middle": 700.0, "high": 1500.0, "top": 3000.0}


@pytest.fixture(scope="session")
def tones(tmp_path_factory) -> Path:
    """A folder with ``train.jsonl``, ``test.jsonl`` and ``tokenizer``: every word is a tone."""
    folder = tmp_path_factory.mktemp("tones")
    generator = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 6)):
        lines = []
        for number in range(count):
            words = generator.choice(list(WORDS), size=int(generator.integers(1, 5)))
            parts = [_tone(WORDS[word], generator) for word in words]
            audio = np.concatenate(parts)
            ends = np.cumsum([0, *map(len, parts)]) / 16_000
            spans = zip(words, ends, ends[1:], strict=False)
            file = f"{name}-{number}.wav"
            soundfile.write(folder / file, audio, 16_000)
            duration = len(audio) / 16_000
            line = {"audio_filepath": file, "duration": duration, "text": " ".join(words)}
            line["words"] = [{"word": str(word), "start": a, "end": b} for word, a, b in spans]
            lines.append(json.dumps(line) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))
    lines = (folder / "train.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    train_tokenizer({"en": texts}, folder / "tokenizer", vocab_size=30)
    return folder


def at_step(monkeypatch, number: int, action):
    advance = ProgressDisplay.advance

    def watched(self, step: int):
        advance(self, step)
        if step == number:
            action()

    monkeypatch.setattr(ProgressDisplay, "advance", watched)


def _tone(frequency: float, generator: np.random.Generator) -> np.ndarray:
    seconds = np.arange(int(generator.integers(3_200, 6_400))) / 16_000
    noise = 0.01 * generator.normal(size=len(seconds))
    return (0.3 * np.sin(2 * np.pi * frequency * seconds) + noise).astype(np.float32)


@pytest.fixture
def make_config(tones, model_config, tmp_path) -> Callable[..., TrainConfig]:
    """A run of two micro-batches a step, with all that could make a resumed run differ."""

    def make(*, data: dict, training: dict, **settings) -> TrainConfig:
        return TrainConfig(data=DataConfig(**data), training=LoopConfig(**training), **settings)

    return varied(
        make,
        name="run",
        output=str(tmp_path),
        seed=3,
        model=replace(
            model_config, spec_augment=SpecAugmentConfig(freq_masks=1, time_masks=1, after_ctc=1.0)
        ),
        loss=LossConfig(
            ctc_weight=0.3,
            transducer_weight=0.0,
            ctc_weight_before=0.5,
            guided_weight=1.0,
            guided_after_ctc=1.0,
        ),
        schedule=ScheduleConfig(name="cosine", warmup_steps=4),
        data={
            "train": str(tones / "train.jsonl"),
            "tokenizer": str(tones / "tokenizer"),
            "frame_budget": 60,
            "micro_batches": 2,
            "workers": 0,
        },
        training={
            "max_steps": 12,
            "log_every": 1,
            "checkpoint_every": 4,
            "ema_decay": 0.9,
            "device": "cpu",
            "tensorboard": False,
        },
    )


@pytest.fixture
def make_timed(make_config, tones, tmp_path) -> Callable[..., TrainConfig]:
    """A run whose decoder writes the times of words, as a Canary does."""
    specials = [*_NEEDED["canary2"], "<|en|>", "<|timestamp|>", *(f"<|{n}|>" for n in range(30))]
    models = {SPECIAL: _special_model(specials)}
    models["en"] = (tones / "tokenizer" / "en.model").read_bytes()
    NeMoTokenizer(models, "canary2").save(tmp_path / "timed")
    return varied(make_config, data={"tokenizer": f"{tmp_path}/timed", "timestamps": "words"})


def varied(make: Callable[..., TrainConfig], **defaults) -> Callable[..., TrainConfig]:
    """A maker of configurations with other defaults, also of ``data`` and ``training``."""

    def changed(**settings) -> TrainConfig:
        sections = {
            name: defaults.get(name, {}) | (settings.get(name) or {})
            for name in ("data", "training")
        }
        return make(**defaults | settings | sections)

    return changed


WORD_PAIRS = {"low": "tief", "middle": "mittel", "high": "hoch", "top": "oben"}
TEXT_ENCODER = TextEncoderConfig(layers=1, heads=2, feed_forward=32, residual_dropout=0.1)
LORA = LoRAConfig(rank=3, alpha=6.0, dropout=0.1, also_train=("*norm*", "ctc_head"))
BEST_RQ = BestRQConfig(codebooks=2, codes=16, code_width=4, span_s=0.16)


@pytest.fixture(scope="session")
def pairs(tones, tmp_path_factory) -> Path:
    """A folder with ``pairs.jsonl``, German to English, and the tokenizer of both."""
    folder = tmp_path_factory.mktemp("pairs")
    generator = np.random.default_rng(0)
    rows, english, german = [], [], []
    for _ in range(120):
        words = generator.choice(list(WORD_PAIRS), size=int(generator.integers(1, 6))).tolist()
        english.append(" ".join(words))
        german.append(" ".join(WORD_PAIRS[word] for word in words))
        languages = {"source_lang": "de", "target_lang": "en"}
        rows.append(json.dumps({"source_text": german[-1], "text": english[-1]} | languages))
    (folder / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    train_tokenizer({"en": english, "de": german}, folder / "tokenizer", vocab_size=30)
    return folder


@pytest.fixture
def make_with_text(make_config, pairs, tones, model_config) -> Callable[..., TrainConfig]:
    """Runs of three micro-batches of speech and one of text a step."""
    sources = {"speech": f"{tones}/train.jsonl", "text": f"{pairs}/pairs.jsonl"}
    data = {
        "train": (),
        "mix": configuration.from_mapping(MixConfig, {"sources": sources}),
        "tokenizer": f"{pairs}/tokenizer",
        "frame_budget": 40,
        "micro_batches": 4,
        "text_share": 0.25,
    }
    return varied(make_config, data=data, model=replace(model_config, text_encoder=TEXT_ENCODER))


def with_half_of_the_texts(tones: Path) -> Path:
    rows = [json.loads(line) for line in (tones / "train.jsonl").read_text().splitlines()]
    for row in rows[1::4]:
        row["text"] = ""
    for row in rows[3::4]:
        del row["text"]
    path = tones / "half.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def make_talks(tmp_path, pairs) -> Callable[..., TrainConfig]:
    """Runs of a language model of a kind, on spoken and written conversations."""

    def make(*, kind: str, name: str, training: dict, **model) -> TrainConfig:
        pytest.importorskip("transformers")
        if not (tmp_path / "llm").exists():
            write_folders(tmp_path, kind)
        folders = {name: f"{tmp_path}/data/{name}.jsonl" for name in ("speech", "text")}
        return talks_config(
            folders | {"llm": f"{tmp_path}/llm"},
            tmp_path,
            name=name,
            model=model_mapping(f"{tmp_path}/llm", **model),
            data={"validation": [f"{pairs}/pairs.jsonl"]},
            evaluation={"max_utterances": 2},
            training=training | {"ema_decay": 0.9},
        )

    return make


@pytest.fixture
def make_with_teacher(make_config, tones) -> Callable[..., TrainConfig]:
    """Runs whose training set has a text in every second line."""
    data = {"text": "optional", "train": str(with_half_of_the_texts(tones))}
    loop = {"teacher": TeacherConfig()}
    return varied(make_config, data=data, training=loop, loss=LossConfig(ctc_weight=0.5))


@pytest.fixture
def make_pretraining(make_config, model_config, tones) -> Callable[..., TrainConfig]:
    """Runs of BEST-RQ on the training set, half of whose lines lack a text."""
    data = {"text": "ignored", "train": str(with_half_of_the_texts(tones)), "tokenizer": ""}
    model = replace(model_config, decoder=None, ctc=False, best_rq=BEST_RQ)
    return varied(make_config, data=data, model=model, loss=LossConfig())


@pytest.fixture(scope="session")
def base(tones, tmp_path_factory) -> Path:
    """A run of two steps, which `make_lora_config` makes, and whose model is then adapted."""
    return tmp_path_factory.mktemp("base")


@pytest.fixture
def make_lora_config(make_config, base) -> Callable[..., TrainConfig]:
    if not (base / "base").exists():
        loop = {"max_steps": 2, "ema_decay": None}
        assert run(make_config(name="base", output=str(base), training=loop)) == 0

    return varied(
        make_config,
        data={"tokenizer": ""},
        lora=LORA,
        init_from=str(base / "base"),
        optimizer=OptimizerConfig(lr=0.02),
    )


@pytest.fixture
def make_by_language(make_lora_config, pairs, tones, tmp_path) -> Callable[..., TrainConfig]:
    """Runs with adapters of English and German; a sixth of the utterances are in French."""
    lines = (tones / "train.jsonl").read_text().replace('"train-', f'"{tones}/train-').splitlines()
    rows = [json.loads(line) for line in lines]
    for number, row in enumerate(rows):
        row["lang"] = "fr" if number % 6 == 5 else ("en", "de")[number % 2]
        if row["lang"] == "de":
            row["text"] = " ".join(WORD_PAIRS[word] for word in row["text"].split())
    (tmp_path / "spoken.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    texts = {code: [x["text"] for x in rows if x["lang"] == code] for code in ("en", "de", "fr")}
    train_tokenizer(texts, tmp_path / "of_three", vocab_size=24)
    data = {"train": f"{tmp_path}/spoken.jsonl", "tokenizer": f"{tmp_path}/of_three"}
    lora = replace(LORA, by_language=("en", "de"), also_train=("ctc_head", "decoder.*_*"))
    return varied(make_lora_config, data=data, lora=lora)


@pytest.fixture
def sources(tones, tmp_path) -> Path:
    """A folder with ``large.jsonl``, ``small.jsonl`` and ``tiny.jsonl``."""
    lines = (tones / "train.jsonl").read_text().replace('"train-', f'"{tones}/train-').splitlines()
    for name, part in (("large", lines[:28]), ("small", lines[28:38]), ("tiny", lines[38:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part) + "\n")
    return tmp_path


def mix(folder: Path, **fields) -> MixConfig:
    below = {"sources": {name: f"{folder}/{name}.jsonl" for name in ("small", "tiny")}}
    mapping = {"large": f"{folder}/large.jsonl", "others": below}
    return configuration.from_mapping(MixConfig, {"sources": mapping, "temperature": 0.5} | fields)


@pytest.fixture
def make_mixed(make_config, sources) -> Callable[..., TrainConfig]:
    return varied(make_config, data={"train": (), "mix": mix(sources, epoch="infinite")})


@pytest.fixture
def eager_compiler(monkeypatch) -> Iterator[None]:
    """Modules are traced but not compiled: torch's own compiler writes C++, which takes minutes."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **options: compile_module(self, **options, backend="aot_eager"),
    )
    torch._dynamo.reset()
    with warnings.catch_warnings():
        # Torch's tracer instantiates autograd functions, and looks at the gradients of all inputs.
        warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)
        yield
    torch._dynamo.reset()


def published(folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model directory, or of the best or newest checkpoint of a run."""
    return load_model(resolve(folder)).model.state_dict()
