"""Whisper on a CPU: fine-tuning against transformers, transcribing also against CTranslate2.

    python profiling/bench.py whisper finetune|transcribe [--model tiny|base|small] [--batch 8]
        [--systems ...] [--threads N] [--lengths FILE] [--steps 20] [--output CSV] [--dry-run]

One random model is written by transformers, imported and exported by effasr and converted by
CTranslate2 (faster-whisper's engine), so all systems have the same weights. Audio is noise and
texts are random tokens, as long as utterances of a list of real ones.

Each system has a process of its own, whose high-water mark is ``peak_bytes``; ``base_bytes`` is
what it held when its packages were imported and no weight was read. They take turns, a step or a
pass each; ``step_s`` is the median of its duration, ``audio_s`` the audio in it, for steps the mean
of an epoch, since all compute as many frames; ``audio_s_per_s`` is their ratio: of a pass, RTFx.

``finetune``: a step is forward, backward, clipping and AdamW in float32.

    transformers    batches of padded features of 30 s, made before the clock starts; its own loss
    effasr_silence  the same utterances packed, silence up to 30 s behind each (minimum_s 30)
    effasr          without silence (minimum_s 0), as much audio in a step on average
    effasr_filled   without silence, as many frames in a step as transformers computes

``transcribe``: a pass is features, encoder and greedy decoding of all utterances. Random weights
end a text anywhere, so the end token is suppressed; every system writes as many tokens of an
utterance as English has in the longest utterance of its batch, where utterances are sorted.

    transformers            ``generate`` on batches of padded features
    ctranslate2_float32     the same batches
    ctranslate2_int8        the same, weights rounded to 8 bits
    effasr_silence, effasr  as above, with continuous batching in as many slots as a batch has

Before anything is timed, losses must agree with transformers' within 1e-3 (also after the updates
of the warm-up), and of the tokens the share --agreement, where systems compute the same function.
What is not installed or not supported is left out, with the reason. Needs transformers; for
CTranslate2 ``pip install ctranslate2``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from benchmarks import harness
from benchmarks.speech import Corpus, Effasr, Transformers, agreement
from benchmarks.workload import LISTED, TOKENS_PER_SECOND, read_durations
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
from effasr.transcription.packed_weights import PackedWeights

COLUMNS = (
    *("task", "system", "model", "minimum_s", "batch", "lengths", "utterances", "audio_s"),
    *("frames", "tokens", "audio_s_per_s", "step_s", "p20_s", "p80_s", "peak_bytes", "base_bytes"),
    *("loss", "loss_difference", "agreement", "note", "threads", "version", *harness.VERSIONS),
)
REFERENCE = "transformers"
CTRANSLATE2 = "ctranslate2_float32", "ctranslate2_int8"
SYSTEMS = {
    "finetune": (REFERENCE, "effasr_silence", "effasr", "effasr_filled"),
    "transcribe": (REFERENCE, *CTRANSLATE2, "effasr_silence", "effasr"),
}
SAME = "effasr_silence", "ctranslate2_float32"  # compute what transformers computes
LOSS_TOLERANCE = 1e-3
_CHECKED = 4  # utterances whose loss is compared before the first step
_PAUSE_S = 0.3  # idle threads of a system may spin for so long after its turn
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
    """One system with one task, alone in its process: it is checked once, then run."""

    def __init__(self, settings: Settings, system: str, package: str = "") -> None:
        self.settings, self.system = settings, system
        self.version = "effasr"  # of which the revision is in the row
        if package:
            from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

            del WhisperForConditionalGeneration  # imported for the memory that it takes
            self.version = f"{package} {importlib.import_module(package).__version__}"
            extractor = WhisperFeatureExtractor
        self.base_bytes = _status("VmRSS")
        if package:
            # It pads utterances to the model's window.
            self._extractor = extractor.from_pretrained(settings.exported)

    def padded(self, audio: Sequence[Any]) -> dict[str, torch.Tensor]:
        made = self._extractor(audio, sampling_rate=16_000, return_tensors="pt")
        return {"input_features": made.input_features}

    def check(self) -> dict[str, Any]:
        """Return what is compared before timing: a loss, or the tokens."""
        raise NotImplementedError

    def run(self, number: int) -> dict[str, Any]:
        """Do one step or one pass; returns ``seconds``, and ``audio_s`` of the usual one."""
        raise NotImplementedError


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

    def _decode(self, features: torch.Tensor, limit: int) -> list[list[int]]:
        raise NotImplementedError


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
        self._weights = PackedWeights(self._model)
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


# --- processes ------------------------------------------------------------------------------------


def _status(name: str) -> int:
    """Return bytes of a line of Linux's account of this process; 0 where there is none."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return 0


def _high_water_mark() -> int:
    """Return the peak memory of this process since it began."""
    # What getrusage gives counts the process that started this one, on Linux as well.
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def build(settings: Settings, system: str) -> System:
    ours, theirs = EffasrPasses, TransformersPasses
    if settings.task == "finetune":
        ours, theirs = EffasrSteps, TransformersSteps
    if system.startswith("ctranslate2"):
        return CTranslate2Passes(settings, system)
    return theirs(settings, system) if system == REFERENCE else ours(settings, system)


def _serve(channel: Any, settings: Settings, system: str) -> None:
    """Load a system, and answer requests until there are no more."""
    with Path(settings.folder, f"{settings.task}_{system}.log").open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        served: dict[str, System] = {}

        def load() -> dict[str, Any]:
            torch.set_num_threads(settings.threads)
            made = served.setdefault("system", build(settings, system))
            return {"version": made.version, "base_bytes": made.base_bytes}

        request: tuple[Any, ...] = ("load",)
        with suppress(EOFError):
            while True:
                name, *arguments = request
                try:
                    if name == "load":
                        reply = load()
                    elif name == "memory":
                        reply = {"peak_bytes": _high_water_mark()}
                    else:
                        reply = getattr(served["system"], name)(*arguments)
                except Exception as error:  # the benchmark says why, and goes on with the others
                    traceback.print_exc()
                    reply = {"error": (str(error) or type(error).__name__).splitlines()[0]}
                channel.send(reply)
                request = channel.recv()


class SystemFailed(Exception):
    """A system cannot be measured; the message says why."""


class SystemProcess:
    """A system in a separate process, so that its memory is separate; it waits between requests."""

    def __init__(self, settings: Settings, system: str) -> None:
        """Begin to load the system; `answer` waits for it."""
        self.system = system
        self._log = Path(settings.folder, f"{settings.task}_{system}.log")
        threads = {f"{name}_NUM_THREADS": str(settings.threads) for name in ("OMP", "MKL")}
        before = dict(os.environ)
        os.environ.update(threads)
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings, system), daemon=True)
        self._process.start()
        theirs.close()
        os.environ.clear()
        os.environ.update(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._channel.close()
        if kind is not None:
            self._process.kill()
        self._process.join()

    def ask(self, request: str, *arguments: int) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        # Of a process that has ended, the missing answer is reported.
        with suppress(BrokenPipeError):
            self._channel.send((request, *arguments))
        return self.answer()

    def answer(self) -> dict[str, Any]:
        try:
            reply = self._channel.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            lines = self._log.read_text().splitlines() if self._log.exists() else []
            last = next((f": {line}" for line in reversed(lines) if line.strip()), "")
            code = self._process.exitcode
            raise SystemFailed(f"its process ended with code {code}{last}") from None
        if "error" in reply:
            raise SystemFailed(reply["error"])
        return reply


# --- the benchmark --------------------------------------------------------------------------------


@dataclass
class Measured:
    process: SystemProcess | None
    about: dict[str, Any]  # the reply after loading, and the result of the check
    checked: dict[str, Any] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    @cached_property
    def ask(self) -> Callable[..., dict[str, Any]]:
        assert self.process is not None
        return self.process.ask


class Benchmark:
    """The systems of one task, those that failed left out."""

    def __init__(self, settings: Settings, least_agreement: float) -> None:
        self.failed: dict[str, str] = {}  # with the reason
        self._settings, self._least = settings, least_agreement
        self._systems: dict[str, Measured] = {}

    def leave_out(self, systems: Sequence[str], reason: str) -> None:
        for system in systems:
            self._systems.pop(system, None)
            self.failed[system] = reason

    def measure(self, systems: Sequence[str], warm: int, steps: int) -> list[dict[str, Any]]:
        """Load, compare and time systems; returns a row for each that did not fail."""
        with ExitStack() as stack:
            started = [
                stack.enter_context(SystemProcess(self._settings, system)) for system in systems
            ]
            for process in started:
                try:
                    self._systems[process.system] = Measured(process, process.answer())
                except SystemFailed as error:
                    self.leave_out([process.system], str(error))
            self._each(lambda one: one.checked.update(one.ask("check")))
            self._compare()
            for number in range(warm + steps):
                self._each(lambda one, number=number: self._run(one, number, number >= warm))
                if number + 1 == warm:
                    self._compare()
            self._each(lambda one: one.about.update(one.ask("memory")))
        return [self._row(system, one) for system, one in self._systems.items()]

    def _each(self, action: Callable[[Measured], None]) -> None:
        for system, one in list(self._systems.items()):
            try:
                action(one)
            except SystemFailed as error:
                self.leave_out([system], str(error))

    def _run(self, one: Measured, number: int, timed: bool) -> None:
        if self._settings.threads > 1:
            time.sleep(_PAUSE_S)
        done = one.ask("run", number)
        if "loss" in done:
            one.losses.append(done["loss"])
        if timed:
            one.runs.append(done)

    def _compare(self) -> None:
        """Compare with transformers, and leave out what should agree and does not."""
        reference = self._systems.get(REFERENCE)
        for system, one in list(self._systems.items()):
            if reference is not None and system != REFERENCE:
                one.about |= compare(system, one, reference)
                if reason := disagreement(system, one.about, self._least):
                    self.leave_out([system], reason)

    def _row(self, system: str, one: Measured) -> dict[str, Any]:
        settings, first = self._settings, one.runs[0]
        p20, p50, p80 = harness.percentiles([run["seconds"] for run in one.runs])
        minimum_s = settings.minimum_s(system)
        note = "weights rounded to 8 bits" if system.endswith("int8") else ""
        if not minimum_s:
            note = "hears no silence: losses and tokens differ from transformers' by definition"
        known = {name: value for name, value in one.about.items() if name in COLUMNS}
        known |= {name: one.checked[name] for name in ("loss",) if name in one.checked}
        return {
            **{"task": settings.task, "system": system, "model": settings.model},
            **{"minimum_s": minimum_s, "batch": settings.batch, "threads": settings.threads},
            **{"lengths": Path(settings.lengths).stem, "note": note},
            "utterances": round(first["utterances"], 1),
            "audio_s": round(first["audio_s"], 2),
            **{name: first[name] for name in ("frames", "tokens") if name in first},
            "audio_s_per_s": round(first["audio_s"] / p50, 2),
            **{"step_s": round(p50, 5), "p20_s": round(p20, 5), "p80_s": round(p80, 5)},
            **{name: _rounded(value) for name, value in known.items()},
        }


def compare(system: str, one: Measured, reference: Measured) -> dict[str, float]:
    """Return ``loss_difference``, as a part of the loss, or ``agreement``, the share of tokens.

    The first is the largest of the check and, where both make the same steps, of the steps so far.
    """
    if "tokens" in one.checked:
        return {"agreement": agreement(one.checked["tokens"], reference.checked["tokens"])}
    pairs = [(one.checked["loss"], reference.checked["loss"])]
    if system in SAME:
        pairs += zip(one.losses, reference.losses, strict=True)
    differences = [abs(ours / theirs - 1) for ours, theirs in pairs]
    # max() may pass over NaN.
    largest = math.nan if any(map(math.isnan, differences)) else max(differences)
    return {"loss_difference": largest}


def disagreement(system: str, about: Mapping[str, Any], least_agreement: float) -> str | None:
    """Return why a system that should agree with transformers is not timed; None if it agrees."""
    if system not in SAME:
        return None
    difference, share = about.get("loss_difference", 0.0), about.get("agreement", 1.0)
    # Not greater, so that NaN does not pass.
    if not difference <= LOSS_TOLERANCE:
        return f"its loss differs from transformers' by {difference:.2g} of it"
    if not share >= least_agreement:
        return f"only {share:.4f} of its tokens are transformers'"
    return None


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _systems(options: argparse.Namespace) -> list[str]:
    """Return the requested systems, in the order of the table; raise for a wrong option."""
    for name in ("batch", "steps", "threads"):
        if getattr(options, name) < 1:
            raise ValueError(f"`--{name}` must be at least 1, but is {getattr(options, name)}.")
    if options.utterances is not None and options.utterances < options.batch:
        raise ValueError(
            f"`--utterances` must be at least --batch = {options.batch}, but is "
            f"{options.utterances}: raise it."
        )
    known = SYSTEMS[options.task]
    for system in options.systems or ():
        if system not in known:
            raise ValueError(
                f"`--systems` of {options.task} must be among {', '.join(known)}, but has {system}."
            )
    return [system for system in known if options.systems is None or system in options.systems]


def _described(row: dict[str, Any]) -> str:
    compared = [
        f"{name.replace('_', ' ')} {row[name]:.4g}"
        for name in ("loss", "loss_difference", "agreement")
        if name in row
    ]
    return (
        f"{row['system']:20} {row['audio_s_per_s']:8.2f} audio s/s  {row['step_s']:8.3f} s for "
        f"{row['audio_s']:.1f} s  peak {row['peak_bytes'] / 1e9:.2f} GB, "
        f"{row['base_bytes'] / 1e9:.2f} GB before the model  {'  '.join(compared)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = harness.parser("whisper", __doc__)
    add = parser.add_argument
    add("task", choices=list(SYSTEMS))
    add("--model", choices=list(SIZES), default="tiny")
    add("--systems", nargs="+", metavar="SYSTEM", help="all of the task by default")
    add("--batch", type=int, default=8, help="utterances of a padded batch")
    add("--steps", type=int, default=20, help="timed steps or passes of each")
    add("--utterances", type=int, help="4000 to train on; 64 to transcribe")
    add("--lengths", type=Path, default=LISTED, help="durations: .txt, .tsv, .jsonl")
    threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    add("--threads", type=int, default=threads, help="of each system")
    add("--agreement", type=float, default=0.9, help="share of tokens that agree")
    add("--dry-run", action="store_true", help="a very small model, 2 steps")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code: 1 if a requested system is missing."""
    options = _parser().parse_args(arguments)
    if options.dry_run:
        options.model, options.batch, options.steps, options.utterances = "dry_run", 2, 2, 12
    try:
        systems = _systems(options)
        read_durations(options.lengths)
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(
                task=options.task,
                model=options.model,
                folder=folder,
                lengths=str(options.lengths),
                utterances=options.utterances or (4000 if options.task == "finetune" else 64),
                batch=options.batch,
                threads=options.threads,
            )
            benchmark = Benchmark(settings, options.agreement)
            if importlib.util.find_spec("ctranslate2") is None:
                benchmark.leave_out(CTRANSLATE2, "ctranslate2 is not installed: pip install it")
            prepare(settings, systems := [s for s in systems if s not in benchmark.failed])
            # Three steps, or the pass in which tokens are compared, are not counted.
            warm = min(3, options.steps) if options.task == "finetune" else 0
            rows = benchmark.measure(systems, warm, options.steps)
    except (ImportError, ValueError, OSError) as error:
        harness.complain(f"bench whisper: {error}")
        return 2
    table = harness.Table(COLUMNS, options.output, _CPU)
    for row in rows:
        table.add(row, _described(row))
    missing = False
    for system, reason in benchmark.failed.items():
        if system in _systems(options):
            harness.complain(f"bench whisper: {system}: left out: {reason}")
            # Where systems are not named, those of an optional package need not be there.
            missing |= options.systems is not None or system not in CTRANSLATE2
    return 1 if missing else 0
