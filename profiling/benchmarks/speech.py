"""A corpus that exists only as lengths, batches of it, and trainers: ours and transformers'."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from benchmarks.workload import LISTED, PROMPT, TOKENS_PER_SECOND, read_durations
from effasr import ranges
from effasr.data.batch import IGNORED, Batch, StaticShape
from effasr.data.collate import Example, collate
from effasr.data.features.config import FeatureConfig
from effasr.data.features.frame_geometry import FASTCONFORMER, Framing
from effasr.data.features.log_mel import LogMel
from effasr.data.sampling.packing import plan_epoch, suggest_token_budget, with_sequences
from effasr.data.sampling.plan import UtteranceLengths, shuffled
from effasr.distributed.process_group import DistributedContext
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.optim.adamw import OptimizerConfig
from effasr.training.build import build_train_state
from effasr.training.config import TrainConfig
from effasr.training.profiler import ProfileConfig, StepProfiler
from effasr.training.step import StepReport, train_step
from effasr_kernels import PackedLayout, PackedSequence

MODELS = yaml.safe_load(Path(__file__).with_name("models.yaml").read_text(encoding="utf-8"))
EOS, PAD = 3, 2
_RATE = 16_000
_NOISE_STARTS = 1_000_000  # samples of the noise where an utterance may begin


@dataclass(frozen=True)
class Corpus:
    seconds: Sequence[float]
    lengths: UtteranceLengths
    classes: int
    framing: Framing = FASTCONFORMER

    @classmethod
    def of(
        cls,
        count: int,
        classes: int,
        longest: float,
        framing: Framing = FASTCONFORMER,
    ) -> "Corpus":
        """Return utterances with the list's durations, in a fixed random order."""
        durations = np.minimum(np.array(read_durations(LISTED)), longest)
        seconds = np.random.default_rng(0).choice(durations, count)
        frames = [framing.frames(round(x * _RATE)) for x in seconds]
        tokens = [len(PROMPT) + max(1, round(TOKENS_PER_SECOND * x)) for x in seconds]
        lengths = UtteranceLengths(np.array(frames, np.int32), np.array(tokens, np.int32))
        return cls(seconds.tolist(), lengths, classes, framing)

    def example(self, index: int) -> Example:
        rng = np.random.default_rng(index)
        begin = int(rng.integers(_NOISE_STARTS))
        noise = _noise(_NOISE_STARTS + round(max(self.seconds) * _RATE))
        audio = noise[begin : begin + round(self.seconds[index] * _RATE)]
        count = int(self.lengths.tokens[index]) - len(PROMPT)
        text = rng.integers(20, self.classes, count).tolist()
        return Example(str(index), audio, list(PROMPT), text, True)

    def shape(self, frame_budget: int) -> StaticShape:
        shape = StaticShape(
            frame_budget,
            suggest_token_budget(self.lengths, frame_budget),
            self.framing.sequences(frame_budget),
            longest_frames=int(self.lengths.frames.max()),
            longest_tokens=int(self.lengths.tokens.max()),
            framing=self.framing,
        )
        return with_sequences(shape, "auto", self.lengths)


@cache
def _noise(samples: int) -> np.ndarray:
    """Drawn once: to draw the minutes of each batch takes longer than to train on them."""
    return 0.1 * np.random.default_rng(0).standard_normal(samples, dtype=np.float32)


def plan_of(system: str, corpus: Corpus, shape: StaticShape) -> list[list[int]]:
    """Return an epoch of a system: the utterances of each micro-batch, of which a step has one."""
    if system in ("random", "transformers"):
        return random_batches(corpus.lengths.frames, shape.frame_budget)
    if system.startswith("packed"):
        plan = plan_epoch(corpus.lengths, shape=shape, micro_batches=1, seed=0, epoch=0)
    else:
        from effasr.data.sampling.options import StrategyOptions
        from effasr.data.sampling.strategies import planner

        options = StrategyOptions(padded=True)
        made = planner(system, corpus.lengths, shape=shape, micro_batches=1, options=options)
        plan = made.plan(0)
    return [plan.step(step)[0].tolist() for step in range(plan.num_steps)]


def random_batches(frames: np.ndarray, budget: int) -> list[list[int]]:
    """Return batches of random utterances, as many as fit padded: the plan of ``random``.

    That one asks lhotse; this one is for where it is not installed. A test compares them.
    """
    batches: list[list[int]] = [[]]
    longest = 0
    for index in shuffled(len(frames), 0, 0).tolist():
        wide = max(longest, int(frames[index]))
        if (len(batches[-1]) + 1) * wide > budget:
            batches.append([])
            wide = int(frames[index])
        batches[-1].append(index)
        longest = wide
    return batches


def representative(plan: list[list[int]], frames: np.ndarray, count: int) -> list[list[int]]:
    """Return micro-batches that stand for an epoch: spread over its micro-batches by their length.

    The first ones need not be typical. A sampler with buckets keeps long utterances back at first,
    and the throughput of a system depends on the length of the utterances.
    """
    plan = [chosen for chosen in plan if chosen]
    if count >= len(plan):
        return [plan[number % len(plan)] for number in range(count)]
    ordered = sorted(plan, key=lambda chosen: float(frames[chosen].mean()))
    return [ordered[(2 * number + 1) * len(plan) // (2 * count)] for number in range(count)]


def batches_of(system: str, corpus: Corpus, shape: StaticShape, steps: int) -> Iterator[Batch]:
    """Yield micro-batches that stand for an epoch of a system, on the host."""
    static = shape if system == "packed_static" else None
    padded = not system.startswith("packed")
    options: dict[str, Any] = {"eos_id": EOS, "pad_id": PAD, "framing": corpus.framing}
    for chosen in representative(plan_of(system, corpus, shape), corpus.lengths.frames, steps):
        examples = [corpus.example(index) for index in chosen]
        yield collate(examples, static, padded=padded, **options)


def random_model(
    config: ModelConfig, classes: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> ASRModel:
    """Return a model of random weights, the same in every run."""
    torch.manual_seed(0)
    # Drawn by the device: a host takes a quarter minute for a billion of them.
    with torch.device("meta"):
        model = ASRModel(config, classes)
    model.to_empty(device=device)
    model.reset_parameters()
    return model.to(dtype)


class Effasr:
    def __init__(self, config: TrainConfig, model: ASRModel, device: torch.device) -> None:
        self._state = build_train_state(config, model, DistributedContext(0, 1, device))

    def step(self, number: int, batch: Batch) -> StepReport:
        return train_step(self._state, [batch], number)

    def record(self, batches: Sequence[Batch], warm: int, folder: Path) -> Path:
        config = ProfileConfig(tool="kineto", first_step=warm, steps=len(batches) - warm)
        with closing(StepProfiler(config, self._state.context, folder)) as capture:
            for number, batch in enumerate(batches):
                with capture.step(number), ranges.range("step", number):
                    self.step(number, batch)
        return folder / "rank0.json.gz"


class Transformers:
    def __init__(
        self,
        model: nn.Module,
        features: Callable[[Sequence[np.ndarray]], Mapping[str, Tensor]],
        optimizer: OptimizerConfig,
        device: torch.device,
        *,
        clip: float,
        bfloat16: bool = False,
    ) -> None:
        self.model = model.to(device).train()
        self._features, self._device, self._clip = features, device, clip
        self._bfloat16 = bfloat16
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            fused=True,
        )

    def inputs(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        tokens = [torch.tensor(example.prompt + example.text) for example in examples]
        targets = [
            torch.tensor([IGNORED] * (len(example.prompt) - 1) + [*example.text, EOS])
            for example in examples
        ]
        pad = nn.utils.rnn.pad_sequence
        made = {
            **self._features([example.audio for example in examples]),
            "decoder_input_ids": pad(tokens, batch_first=True, padding_value=PAD),
            "labels": pad(targets, batch_first=True, padding_value=IGNORED),
        }
        if "attention_mask" in made:  # Canary's; Whisper reads its windows whole
            mask = [torch.ones(len(row), dtype=torch.long) for row in tokens]
            made["decoder_attention_mask"] = pad(mask, batch_first=True)
        if self._device.type == "cuda":
            made = {name: value.pin_memory() for name, value in made.items()}
        return made

    def loss(self, inputs: Mapping[str, Tensor]) -> Tensor:
        moved = {name: value.to(self._device, non_blocking=True) for name, value in inputs.items()}
        labels = moved.pop("labels")
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bfloat16):
            logits = self.model(**moved).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)

    def step(self, inputs: Mapping[str, Tensor]) -> Tensor:
        loss = self.loss(inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def transformers_model(model: ASRModel, device: torch.device) -> Any:
    import transformers

    from effasr.interop.huggingface.checkpoint import export_model

    transformers.utils.logging.disable_progress_bar()
    name = "Whisper" if model.config.features.kind == "whisper" else "Canary"
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    with tempfile.TemporaryDirectory() as folder:
        export_model(model, folder)
        return kind.from_pretrained(folder).to(device)


def padded_features(
    config: FeatureConfig, audio: Sequence[np.ndarray], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Return ``input_features`` (B, 1 + longest // hop, mel_bins), and ``attention_mask`` (B, ...).

    They are computed by our own code: ``ParakeetFeatureExtractor`` needs librosa in versions before
    5.23; the values are the same.
    """
    device, lengths = torch.device(device), [len(samples) for samples in audio]
    samples = torch.from_numpy(np.concatenate(audio)).to(device)
    packed = PackedSequence(samples, PackedLayout.from_lengths(lengths, device))
    frames = PackedLayout.from_lengths([config.encoder_frames(n) for n in lengths], device)
    mel = LogMel(config).to(device)(packed, frames)
    counts = [length // config.hop for length in lengths]
    features = mel.values.new_zeros(len(audio), 1 + max(lengths) // config.hop, config.mel_bins)
    for row, (count, begin) in enumerate(zip(counts, frames.cu_seqlens_host, strict=False)):
        first = begin * config.rows_per_frame
        features[row, :count] = mel.values[first : first + count]
    column = torch.arange(features.shape[1], device=device)
    mask = column < torch.tensor(counts, device=device)[:, None]
    return {"input_features": features, "attention_mask": mask}


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that agree, up to the first of each utterance that does not.

    After it the two have read different texts.
    """
    same = 0
    for tokens, other_items in zip(ours, theirs, strict=True):
        pairs = enumerate(zip(tokens, other_items, strict=False))
        same += next((i for i, (a, b) in pairs if a != b), len(tokens))
    return same / sum(map(len, ours))
