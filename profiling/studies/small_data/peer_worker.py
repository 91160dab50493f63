"""Trains the peer for a given CPU time, and transcribes a set with it.

    PYTHONPATH=PEER:profiling:profiling/studies python -m small_data.peer_worker SETTINGS.json

Writes ``result.json``, and per decoding method ``hypotheses_NAME.jsonl`` with id and text.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import sentencepiece
import soundfile
import torch
from speechbrain.augment.time_domain import SpeedPerturb  # pyright: ignore[reportMissingImports]
from speechbrain.dataio.sampler import (  # pyright: ignore[reportMissingImports]
    DynamicBatchSampler,
)
from speechbrain.nnet.schedulers import NoamScheduler  # pyright: ignore[reportMissingImports]
from speechbrain.utils.checkpoints import (  # pyright: ignore[reportMissingImports]
    average_state_dicts,
)
from torch import Tensor, nn

from effasr.evaluation.normalizer import get_normalizer
from small_data.peer_model import BOS, EOS, Peer
from small_data.peer_settings import PeerSettings

_TRIAL_BATCHES = 8
"""Batches that a copy of the model trains on before the run, to measure the time of a step."""
_BUCKETS = 20
_CLIP = 5.0


class Utterances:
    """A manifest with tokenized texts."""

    def __init__(self, manifest: str, tokenizer: sentencepiece.SentencePieceProcessor) -> None:
        self.rows = [json.loads(line) for line in Path(manifest).read_text("utf-8").splitlines()]
        self.tokens = [tokenizer.encode(row["train_text"]) for row in self.rows]
        self.durations = [row["duration"] for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: list[int]) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Return audio (B, samples), lengths relative to the longest (B,), and tokens."""
        waves = [read_audio(self.rows[index]["audio_filepath"]) for index in indices]
        longest = max(map(len, waves))
        lengths = torch.tensor([len(wave) / longest for wave in waves])
        padded = nn.utils.rnn.pad_sequence(waves, batch_first=True)
        return padded, lengths, [self.tokens[index] for index in indices]


def read_audio(path: str) -> Tensor:
    """Return audio as float32 (samples,), at 16 kHz."""
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == 16_000, f"{path} must be at 16 kHz, but is at {rate} Hz"
    return torch.from_numpy(samples)


def train_tokenizer(texts: list[str], size: int) -> sentencepiece.SentencePieceProcessor:
    """Train a unigram model with blank (as unknown) 0, begin 1 and end 2."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=size,
        model_type="unigram",
        character_coverage=1.0,
        unk_id=0,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


class Trainer:
    """Trains as the recipes do: Adam with the Noam schedule, speed perturbation, SpecAugment."""

    def __init__(self, settings: PeerSettings, model: Peer, data: Utterances, steps: int) -> None:
        self.settings, self.model, self.data, self.steps = settings, model, data, steps
        self.speed = SpeedPerturb(16_000, [95, 100, 105])
        self.optimizer = torch.optim.Adam(model.parameters(), settings.lr, (0.9, 0.98), 1e-9)
        warmup = max(1, round(settings.warmup_share * steps))
        self.schedule = NoamScheduler(settings.lr, warmup)
        self.step, self.epoch, self.audio_s, self.ctc = 0, 0, 0.0, 0.0
        self.ends: deque[dict[str, Tensor]] = deque(maxlen=settings.averaged)

    def batches(self) -> Iterator[list[int]]:
        """Yield batches of all epochs; the weights at the end of each epoch are kept."""
        sampler = DynamicBatchSampler(
            self.data,
            self.settings.batch_s,
            num_buckets=_BUCKETS,
            lengths_list=self.data.durations,
            shuffle=True,
            batch_ordering="random",
            seed=self.settings.seed,
        )
        while True:
            self.epoch += 1
            sampler.set_epoch(self.epoch)
            yield from sampler
            self.ends.append(copy.deepcopy(self.model.state_dict()))

    def update(self, indices: list[int]) -> None:
        """Do one training step."""
        audio, lengths, tokens = self.data.batch(indices)
        augment = self.step >= self.settings.spec_augment_after * self.steps
        loss, ctc = self.model.loss(
            self.speed(audio), lengths, tokens, epoch=self.epoch, augment=augment
        )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), _CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule(self.optimizer)
        self.step += 1
        self.audio_s += sum(self.data.durations[index] for index in indices)
        self.ctc = ctc if self.step == 1 else 0.98 * self.ctc + 0.02 * ctc

    def average(self) -> None:
        """Set the model to the mean of the weights at the ends of the last epochs."""
        if self.ends:
            trained = {name for name, _ in self.model.named_parameters()}
            parts = [{name: end[name].clone() for name in trained} for end in self.ends]
            self.model.load_state_dict(average_state_dicts(parts), strict=False)


def main() -> None:
    """Train and transcribe."""
    logging.getLogger("speechbrain").setLevel(logging.ERROR)
    settings = PeerSettings.load(Path(sys.argv[1]))
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    out = Path(settings.out)
    train_manifest = write_texts(settings, out)
    rows = [json.loads(line) for line in train_manifest.read_text("utf-8").splitlines()]
    tokenizer = train_tokenizer([row["train_text"] for row in rows], settings.vocab_size)
    data = Utterances(str(train_manifest), tokenizer)
    model = Peer(settings, tokenizer.vocab_size())
    model.train()

    trial = Trainer(settings, copy.deepcopy(model), data, steps=1)
    began = time.process_time()
    for indices, _ in zip(trial.batches(), range(_TRIAL_BATCHES), strict=False):
        trial.update(indices)
    steps = round(settings.cpu_s * _TRIAL_BATCHES / (time.process_time() - began))

    trainer = Trainer(settings, model, data, steps)
    began = time.process_time()
    for indices in trainer.batches():
        trainer.update(indices)
        if trainer.step % 50 == 0:
            print(f"step {trainer.step} of about {steps}: CTC {trainer.ctc:.3f}", flush=True)  # noqa: T201
        if time.process_time() - began >= settings.cpu_s:
            break
    cpu_s = time.process_time() - began
    trainer.average()
    transcribe(settings, model, tokenizer, out)
    result = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": trainer.step,
        "epochs": trainer.epoch,
        "audio_s": trainer.audio_s,
        "cpu_s": cpu_s,
        "ctc": trainer.ctc,
    }
    (out / "result.json").write_text(json.dumps(result), encoding="utf-8")


def write_texts(settings: PeerSettings, out: Path) -> Path:
    """Write a copy of the manifest with the training texts and return its path."""
    normalize = get_normalizer("none" if settings.raw_text else "basic")
    lines = []
    for line in Path(settings.train).read_text("utf-8").splitlines():
        row = json.loads(line)
        lines.append(json.dumps(row | {"train_text": normalize(row["text"])}) + "\n")
    path = out / "train.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    return path


@torch.no_grad()
def transcribe(
    settings: PeerSettings,
    model: Peer,
    tokenizer: sentencepiece.SentencePieceProcessor,
    out: Path,
) -> None:
    """Write the results of greedy CTC and of the joint search, one utterance at a time."""
    model.eval()
    search, found = model.searcher(), {"ctc": [], "joint": []}
    for line in Path(settings.test).read_text("utf-8").splitlines():
        path = json.loads(line)["audio_filepath"]
        whole = torch.ones(1)
        encoded = model.encode(read_audio(path)[None], whole)
        hypotheses = search(encoded, whole)[0]
        for name, tokens in (("ctc", model.greedy_ctc(encoded)), ("joint", hypotheses[0])):
            kept = [int(token) for token in tokens]
            found[name].append({"id": path, "text": tokenizer.decode(kept)})
    for name, rows in found.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (out / f"hypotheses_{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
