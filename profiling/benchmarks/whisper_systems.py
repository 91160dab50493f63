"""The systems of the Whisper benchmark: one random model, read by each package."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.speech import Corpus, Effasr, Transformers
from benchmarks.workload import TOKENS_PER_SECOND
from effasr.data.batch import Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.frame_geometry import Framing
from effasr.data.sampling.packing import plan_epoch
from effasr.data.sampling.shuffle import shuffled
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.interop.huggingface.checkpoint import SpecialTokens, export_model, import_model
from effasr.model.asr import ASRModel
from effasr.model.cost import cost_model
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training.config import LoopConfig, TrainConfig, resolve_losses
from effasr.training.loss import LossConfig
from effasr.transcription.batching import plan_batches
from effasr.transcription.cpu_weights import OneDNNWeights

REFERENCE = "transformers"
CTRANSLATE2 = "ctranslate2_float32", "ctranslate2_int8"
SYSTEMS = {
    "finetune": (REFERENCE, "effasr_silence", "effasr", "effasr_filled"),
    "transcribe": (REFERENCE, *CTRANSLATE2, "effasr_silence", "effasr"),
}
_CHECKED = 4  # utterances whose loss is compared before the first step
_CPU = torch.device("cpu")

_WORDS = EOS = 50_257
# <|startoftranscript|> <|en|> <|transcribe|> <|notimestamps|> of multilingual models
PROMPT = (50_258, 50_259, 50_359, 50_363)
_LANGUAGES, _TIMESTAMPS, _CLASSES = 99, 1_501, 51_865
# Values of recipes/finetune_whisper.yaml, with a rate at which three updates change the loss.
OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.0)


class Size(NamedTuple):
    width: int  # feed-forward networks are four times as wide
    layers: int  # of encoder and decoder each
    heads: int
    # What the encoder was made for; silence follows shorter utterances, unless minimum_s is 0.
    window_s: int = 30


SIZES = {
    "dry_run": Size(32, 1, 2, window_s=4),
    "tiny": Size(384, 4, 6),
    "base": Size(512, 6, 8),
    "small": Size(768, 12, 12),
}


@dataclass(frozen=True)
class Settings:
    task: str
    model: str  # a name of SIZES
    folder: str  # of the checkpoints that `prepare` writes
    lengths: str
    utterances: int  # drawn from the lengths; `transcribe` decodes them all in a run
    batch: int  # utterances of a batch of padded features
    threads: int

    @property
    def size(self) -> Size:
        return SIZES[self.model]

    @property
    def exported(self) -> Path:
        """The checkpoint that transformers reads: exported by effasr."""
        return Path(self.folder) / "exported"

    @property
    def imported(self) -> Path:
        """The checkpoint that effasr imports: written by transformers."""
        return Path(self.folder) / "transformers"

    def converted(self, compute_type: str) -> Path:
        """Return the checkpoint that CTranslate2 reads."""
        return Path(self.folder) / f"ctranslate2_{compute_type}"

    def minimum_s(self, system: str) -> int:
        return 0 if system in ("effasr", "effasr_filled") else self.size.window_s

    def corpus(self, framing: Framing) -> Corpus:
        options: dict[str, Any] = {"listed": Path(self.lengths), "prompt": PROMPT}
        return Corpus.of(self.utterances, _WORDS, self.size.window_s, framing, **options)

    def random_batches(self) -> list[list[int]]:
        """Return an epoch in random order, in batches of equal size; the rest is left out."""
        order = shuffled(self.utterances, 0, 0).tolist()
        ends = range(self.batch, len(order) + 1, self.batch)
        return [order[end - self.batch : end] for end in ends]


def status_bytes(name: str) -> int:
    """Return bytes of a line of Linux's account of this process; 0 where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


# --- one random model in the formats that all systems read ----------------------------------------


def prepare(settings: Settings, systems: Sequence[str]) -> None:
    """Write the checkpoint of transformers, import it, export it again, and convert it.

    transformers then trains and decodes what effasr exported, so that a mistake on either way shows
    in the losses and tokens; here the exported weights must equal the first ones bit by bit.
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
    again = type(model).from_pretrained(settings.exported).state_dict()
    for name, value in model.state_dict().items():
        if not torch.equal(value, again[name]):
            raise ValueError(f"{name} must be exported as it was imported, but differs.")
    for system in systems:
        if system in CTRANSLATE2:
            from ctranslate2.converters import TransformersConverter

            precision = system.removeprefix("ctranslate2_")
            options = {"quantization": None if precision == "float32" else precision}
            converter = TransformersConverter(str(settings.exported))
            converter.convert(str(settings.converted(precision)), force=True, **options)


def _random(size: Size) -> Any:
    """Return a model whose tokens depend on position and speech, like those of trained ones.

    With the weights that transformers draws, a decoder repeats one token whatever it reads, and all
    losses are the logarithm of the number of classes: no comparison could fail. Here products are
    about twice as large as what is multiplied.
    """
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    sides = ("encoder", "decoder")
    config = WhisperConfig(
        vocab_size=_CLASSES,
        d_model=size.width,
        **{f"{side}_layers": size.layers for side in sides},
        **{f"{side}_attention_heads": size.heads for side in sides},
        **{f"{side}_ffn_dim": 4 * size.width for side in sides},
        max_source_positions=50 * size.window_s,
        **{f"{name}_token_id": EOS for name in ("pad", "bos", "eos")},
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
    words += [f"word{index}" for index in range(len(words), _WORDS)]
    made = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    specials = [
        *("endoftext", "startoftranscript", *list(LANGUAGES)[:_LANGUAGES], "translate"),
        *("transcribe", "startoflm", "startofprev", "nospeech", "notimestamps"),
    ]
    options: dict[str, Any] = {"normalized": False, "special": True}
    made.add_special_tokens([AddedToken(f"<|{name}|>", **options) for name in specials])
    stamps = [f"<|{step / 50:.2f}|>" for step in range(_TIMESTAMPS)]
    made.add_tokens([AddedToken(name, normalized=False) for name in stamps])
    assert made.get_vocab_size() == _CLASSES
    made.save(str(folder / "tokenizer.json"))
    end = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>")
    described = {"tokenizer_class": "WhisperTokenizer", **end}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def _transformers_model(settings: Settings) -> Any:
    from transformers import WhisperForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return WhisperForConditionalGeneration.from_pretrained(settings.exported)


def _effasr_model(settings: Settings, system: str) -> ASRModel:
    """Import the checkpoint, without augmentation, whose draws no two systems share."""
    config, classes, state = import_model(settings.imported)
    config = replace(
        config,
        features=replace(config.features, minimum_s=float(settings.minimum_s(system))),
        spec_augment=replace(config.spec_augment, freq_masks=0, time_masks=0),
    )
    return ASRModel.from_state_dict(config, classes, state)


class System:
    """One system with one task, alone in its process.

    `check` returns what is compared before timing, a loss or the tokens; `run` does one step or one
    pass, and returns ``seconds``, and ``audio_s`` of the usual one.
    """

    def __init__(self, settings: Settings, system: str, package: str = "") -> None:
        self.settings, self.system = settings, system
        self.version = "effasr"  # of which the revision is in the row
        if package:
            from transformers import WhisperFeatureExtractor as extractor

            if package == REFERENCE:
                from transformers import WhisperForConditionalGeneration  # noqa: F401
            self.version = f"{package} {importlib.import_module(package).__version__}"
        self.base_bytes = status_bytes("VmRSS")
        if package:
            # It pads utterances to the model's window.
            self._extractor = extractor.from_pretrained(settings.exported)

    def padded(self, audio: Sequence[Any]) -> dict[str, torch.Tensor]:
        made = self._extractor(audio, sampling_rate=16_000, return_tensors="pt")
        return {"input_features": made.input_features}


# --- fine-tuning ----------------------------------------------------------------------------------


def _step_means(corpus: Corpus, plan: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return utterances and audio seconds of a step, on average over an epoch.

    All steps of a system compute as much, whatever part of it is speech. So the time of some steps
    is that of any, while the audio in them is a small sample.
    """
    audio = sum(corpus.seconds[index] for batch in plan for index in batch)
    return {"utterances": sum(map(len, plan)) / len(plan), "audio_s": audio / len(plan)}


class TransformersSteps(System):
    """transformers' Whisper as its users fine-tune it; features are ready before the clock starts.

    Its own loss, with labels for the same targets as effasr's: the text and its end.
    """

    def __init__(self, settings: Settings, system: str) -> None:
        super().__init__(settings, system, "transformers")
        self._corpus, self._plan = settings.corpus(Framing()), settings.random_batches()
        model, ids = _transformers_model(settings), {"pad_id": EOS, "eos_id": EOS}
        clip = LoopConfig().clip
        self._trainer = Transformers(model, self.padded, OPTIMIZER, _CPU, clip=clip, **ids)
        self._trainer.loss = lambda inputs: model(**inputs).loss

    def _inputs(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        return self._trainer.inputs([self._corpus.example(index) for index in indices])

    @torch.no_grad()
    def check(self) -> dict[str, Any]:
        self._trainer.model.eval()
        loss = float(self._trainer.loss(self._inputs(self._plan[0][:_CHECKED])))
        self._trainer.model.train()
        return {"loss": loss}

    def run(self, number: int) -> dict[str, Any]:
        inputs = self._inputs(self._plan[number % len(self._plan)])
        began = time.perf_counter()
        loss = self._trainer.step(inputs)
        seconds = time.perf_counter() - began
        features = inputs["input_features"]
        done = {"seconds": seconds, "frames": len(features) * features.shape[-1] // 2}
        return done | {"loss": float(loss)} | _step_means(self._corpus, self._plan)


class EffasrSteps(System):
    """effasr's trainer on packed batches of a static shape; features are a part of the step.

    `effasr_silence` has the utterances of transformers in each step, `effasr` as much audio as
    transformers on average, and `effasr_filled` as many encoder frames as transformers computes.
    """

    def __init__(self, settings: Settings, system: str) -> None:
        super().__init__(settings, system)
        self._model = _effasr_model(settings, system)
        self._corpus = settings.corpus(self._model.config.features.framing)
        self.shape, self.plan = self._packed()
        config = TrainConfig(
            model=self._model.config,
            loss=resolve_losses(LossConfig(label_smoothing=0.0), self._model.config),
            optimizer=OPTIMIZER,
            # The peak throughout, as transformers' optimizer has it without a schedule.
            schedule=ScheduleConfig(name="flat_cosine", warmup_steps=0, flat_fraction=1.0),
            training=LoopConfig(precision="float32", device="cpu"),
        )
        self._trainer = Effasr(config, self._model, _CPU)

    def _packed(self) -> tuple[StaticShape, list[list[int]]]:
        corpus, config, batch = self._corpus, self._model.config, self.settings.batch
        lengths, sequences = corpus.lengths, corpus.framing.sequences
        most = config.encoder.max_frames
        assert most is not None  # of Whisper's encoder
        if self.system == "effasr_silence":
            plan = self.settings.random_batches()
            tokens = max(int(lengths.tokens[chosen].sum()) for chosen in plan)
            budget = batch * most
            return corpus.shape(budget, tokens=tokens, sequences=sequences(budget)), plan
        budget = batch * most
        if self.system == "effasr":
            usual = round(batch * float(lengths.frames.mean()))
            budget = max(usual, int(lengths.frames.max()))
        shape = corpus.shape(budget, sequences=sequences(budget))
        cost = cost_model(config, self._model.vocab_size)
        epoch = plan_epoch(lengths, shape=shape, micro_batches=1, seed=0, epoch=0, cost=cost)
        return shape, [epoch.step(step)[0].tolist() for step in range(epoch.num_steps)]

    def batch(self, indices: Sequence[int], *, static: bool = True) -> Batch:
        """Return a batch of these, of the static shape or of their own."""
        examples = [self._corpus.example(index) for index in indices]
        options: dict[str, Any] = {"eos_id": EOS, "pad_id": EOS, "framing": self._corpus.framing}
        return collate(examples, self.shape if static else None, **options)

    @torch.no_grad()
    def check(self) -> dict[str, Any]:
        self._model.eval()
        # Those of transformers, which may not fit into the static shape.
        batch = self.batch(self.settings.random_batches()[0][:_CHECKED], static=False)
        loss = float(self._model(batch).cross_entropy) / batch.num_targets
        self._model.train()
        return {"loss": loss}

    def run(self, number: int) -> dict[str, Any]:
        batch = self.batch(self.plan[number % len(self.plan)])
        began = time.perf_counter()
        loss = self._trainer.timed_step(number, batch)
        seconds = time.perf_counter() - began
        done = {"seconds": seconds, "frames": batch.frames.rows, "loss": loss}
        return done | _step_means(self._corpus, self.plan)


# --- transcription --------------------------------------------------------------------------------


class Passes(System):
    """A pass transcribes all utterances; `limits` are the tokens of each."""

    def __init__(self, settings: Settings, system: str, package: str = "") -> None:
        super().__init__(settings, system, package)
        corpus = settings.corpus(Framing())
        self._examples = [corpus.example(index) for index in range(settings.utterances)]
        order = sorted(range(settings.utterances), key=lambda index: -corpus.seconds[index])
        begins = range(0, len(order), settings.batch)
        self._batches = [order[begin : begin + settings.batch] for begin in begins]
        self._limits: dict[int, int] = {}
        for batch in self._batches:
            longest = max(corpus.seconds[index] for index in batch)
            limit = max(1, round(TOKENS_PER_SECOND * longest))
            self._limits |= dict.fromkeys(batch, limit)

    def check(self) -> dict[str, Any]:
        texts = self._transcribe()
        for index, limit in self._limits.items():
            if len(texts[index]) != limit:
                raise ValueError(
                    f"utterance {index} must have {limit} tokens, but has {len(texts[index])}."
                )
        return {"tokens": [texts[index] for index in range(len(texts))]}

    def run(self, number: int) -> dict[str, Any]:
        del number
        began = time.perf_counter()
        self._transcribe()
        seconds = time.perf_counter() - began
        audio = sum(len(example.audio) for example in self._examples) / 16_000
        done = {"seconds": seconds, "audio_s": audio, "utterances": len(self._examples)}
        return done | {"tokens": sum(self._limits.values())}

    def _transcribe(self) -> dict[int, list[int]]:
        """Decode batches of features that transformers' extractor pads to the model's window."""
        texts: dict[int, list[int]] = {}
        for batch in self._batches:
            features = self.padded([self._examples[index].audio for index in batch])
            tokens = self._decode(features["input_features"], self._limits[batch[0]])
            texts |= dict(zip(batch, tokens, strict=True))
        return texts


class TransformersPasses(Passes):
    def __init__(self, settings: Settings, system: str) -> None:
        super().__init__(settings, system, "transformers")
        self._model = _transformers_model(settings).eval()

    @torch.no_grad()
    def _decode(self, features: torch.Tensor, limit: int) -> list[list[int]]:
        prompts = torch.tensor([PROMPT] * len(features))
        made = self._model.generate(
            features, decoder_input_ids=prompts, max_new_tokens=limit, do_sample=False
        )
        return made[:, -limit:].tolist()


class CTranslate2Passes(Passes):
    """CTranslate2, with which faster-whisper decodes, in the precision that the system names."""

    def __init__(self, settings: Settings, system: str) -> None:
        import ctranslate2

        super().__init__(settings, system, "ctranslate2")
        compute_type = system.removeprefix("ctranslate2_")
        known = ctranslate2.get_supported_compute_types("cpu")
        if compute_type not in known:
            raise ValueError(f"this CPU has no {compute_type}: {', '.join(sorted(known))}.")
        self._storage = ctranslate2.StorageView.from_array
        self._model = ctranslate2.models.Whisper(
            str(settings.converted(compute_type)),
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=settings.threads,
        )

    def _decode(self, features: torch.Tensor, limit: int) -> list[list[int]]:
        results = self._model.generate(
            self._storage(features.numpy()),
            [list(PROMPT)] * len(features),
            beam_size=1,
            # It writes half as many tokens, or what the prompt leaves of them if that is less.
            max_length=max(2 * limit, limit + len(PROMPT)),
            suppress_blank=False,
        )
        return [result.sequences_ids[0] for result in results]


class EffasrPasses(Passes):
    """Decode a window of utterances as ``effasr transcribe``, in as many slots as a batch has.

    The lengths that it would allow a transcript are replaced by those that all systems are asked
    for. The encoder's batches have at most the frames that the others pad theirs to.
    """

    def __init__(self, settings: Settings, system: str) -> None:
        super().__init__(settings, system)
        self._model = _effasr_model(settings, system).eval()
        self._weights = OneDNNWeights(self._model)
        most = self._model.config.encoder.max_frames
        assert most is not None  # of Whisper's encoder
        self._most, self._slots = most, settings.batch

    @torch.no_grad()
    def _transcribe(self) -> dict[int, list[int]]:
        features = self._model.config.features
        frames = [features.encoder_frames(len(example.audio)) for example in self._examples]
        budget = self._slots * self._most
        sizes = {"slots": self._slots, "max_frames": self._most, "frame_budget": budget}
        engine = Engine(self._model, EOS, **sizes)
        texts: dict[int, list[int]] = {}
        with self._weights.active():
            for indices in plan_batches(frames, budget, self._slots):
                self._submit(engine, indices, [self._examples[index] for index in indices])
                texts |= {name: list(x.tokens) for name, x in engine.results(drain=False)}
            texts |= {name: list(x.tokens) for name, x in engine.results()}
        return texts

    def _submit(self, engine: Engine, names: Sequence[int], examples: Sequence[Example]) -> None:
        framing = self._model.config.features.framing
        batch = collate(examples, eos_id=EOS, pad_id=EOS, framing=framing)
        encoded = self._model.encode(batch)
        engine.submit(encoded, [Utterance(name, PROMPT, self._limits[name]) for name in names])


def build(settings: Settings, system: str) -> System:
    ours, theirs = EffasrPasses, TransformersPasses
    if settings.task == "finetune":
        ours, theirs = EffasrSteps, TransformersSteps
    if system.startswith("ctranslate2"):
        return CTranslate2Passes(settings, system)
    return theirs(settings, system) if system == REFERENCE else ours(settings, system)
