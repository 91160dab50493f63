"""Answers of a language model by continuous batching, and against transformers' generate: tokens/s.

    python profiling/bench_conversations.py [--size small|full] [--slots 16] [--conversations 64]
        [--answers transcripts|replies] [--caches contiguous paged] [--peer] [--output ROWS.csv]

A model of random weights answers conversations of text as long as instructions with a recording:
each has rows for the seconds of an utterance. Its answer has as many tokens as English of that
length, a transcript; or of the length of another utterance, as replies to questions, whose length
follows from nothing that is known before. With --peer, transformers generates from the same
weights, in batches of --slots conversations that are sorted by length, padded to the longest, until
the longest answer of the batch is complete. Systems are timed in turns.

How far answers agree is checked before anything is timed: to 90 % of the tokens in float32, and
10 % in bfloat16, where two tokens of random weights are often equally likely up to rounding, and an
answer goes its own way from there on.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench import rows
from bench.provenance import provenance
from bench.workload import FRAMES_PER_SECOND, LISTED, read_durations
from bench_inference import TOKENS_PER_SECOND, Clock, agreement

from effasr.data.conversation.batch import ConversationBatch
from effasr.data.conversation.collate import asking, collate_conversations
from effasr.data.features.config import FeatureConfig
from effasr.decoding.language_model.engine import ConversationEngine
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.language_model.config import LanguageModelConfig

STACK = 4
INSTRUCTION = 24
"""Rows of a conversation that are not speech."""
REPLIES = "replies"
LEAST_AGREEMENT = {torch.float32: 0.9, torch.bfloat16: 0.1}
"""Share of the tokens up to the first that differs."""
COLUMNS = (
    *("system", "size", "answers", "cache", "slots", "conversations", "rows", "tokens"),
    *("tokens_per_s", "p20_s", "p50_s", "p80_s", "peak_mb", "agreement", "threads", "dtype"),
    *("device", "torch", "triton", "git", "date"),
)
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    },
    "small": {
        "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    },
    # Qwen3 of 1.7 billion weights.
    "full": {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """The conversations.

    Attributes:
        batch: Batch on the device.
        limits: Tokens of each answer.
    """

    batch: ConversationBatch
    limits: list[int]


def architecture(size: str) -> dict[str, Any]:
    """Return the ``config.json`` of a language model."""
    return {"model_type": "qwen3", "max_position_embeddings": 4096, **SIZES[size]}


def build(size: str, device: torch.device, dtype: torch.dtype) -> ASRModel:
    """Return a model of random weights in evaluation mode; its encoder is not used."""
    torch.manual_seed(0)
    encoder = FastConformerConfig(
        width=16, layers=1, heads=2, feed_forward=16, subsampling_channels=4
    )
    config = ModelConfig(
        features=FeatureConfig(mel_bins=16),
        encoder=encoder,
        decoder=None,
        language_model=LanguageModelConfig(
            architecture=json.dumps(architecture(size)), stack=STACK, weights="random"
        ),
    )
    with torch.device(device):
        model = ASRModel(config, SIZES[size]["vocab_size"])
    return model.to(device, dtype).eval()


def conversations(count: int, answers: str, vocabulary: int, device: torch.device) -> Asked:
    """Draw conversations as long as those about real utterances, and lengths of answers."""
    draw = random.Random(0)
    durations = draw.choices(read_durations(LISTED), k=count)
    lengths = [INSTRUCTION + round(s * FRAMES_PER_SECOND / STACK) for s in durations]
    examples = [
        asking(str(n), [draw.randrange(3, vocabulary) for _ in range(length)])
        for n, length in enumerate(lengths)
    ]
    framing = FeatureConfig(mel_bins=16).framing
    batch = collate_conversations(examples, stack=STACK, pad_id=0, framing=framing).to(device)
    if answers == REPLIES:
        draw.shuffle(durations)
    return Asked(batch, [max(1, round(TOKENS_PER_SECOND * seconds)) for seconds in durations])


class Ours:
    """Greedy search with continuous batching."""

    def __init__(self, model: ASRModel, asked: Asked, slots: int, *, paged: bool) -> None:
        self._model, self._asked = model, asked
        self._slots, self._paged = slots, paged

    def answer(self) -> list[list[int]]:
        """Return the tokens of every answer."""
        engine = ConversationEngine(self._model, (), slots=self._slots, paged=self._paged)
        engine.submit(self._asked.batch, self._asked.limits, range(len(self._asked.limits)))
        found = dict(engine.results())
        return [list(found[name].tokens) for name in range(len(found))]


class Peer:
    """transformers' model with the same weights, in padded batches of neighbours in length."""

    def __init__(self, model: ASRModel, asked: Asked, slots: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        own = model.language_model
        assert own is not None
        fields = json.loads(own.config.architecture or "{}")
        config = AutoConfig.for_model(**fields)
        loaded: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        loaded.to(own.output_weight.device, own.output_weight.dtype)
        state = own.state_dict()
        named = {theirs: state[ours] for ours, theirs in own.causal_names()}
        loaded.load_state_dict(named, strict=False)
        loaded.tie_weights()
        self._model = loaded.eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        lengths = asked.batch.token_lengths
        parts = asked.batch.tokens.values[: sum(lengths)].split(list(lengths))
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        self._batches = []
        for begin in range(0, len(order), slots):
            names = order[begin : begin + slots]
            longest = max(lengths[n] for n in names)
            ids = torch.zeros(len(names), longest, dtype=torch.int64, device=parts[0].device)
            mask = torch.zeros_like(ids)
            for row, n in enumerate(names):
                ids[row, longest - lengths[n] :] = parts[n]
                mask[row, longest - lengths[n] :] = 1
            self._batches.append((names, ids, mask, max(asked.limits[n] for n in names)))
        self._limits = asked.limits

    @torch.no_grad()
    def answer(self) -> list[list[int]]:
        """Return the tokens of every answer, by `generate`."""
        found: list[list[int]] = [[] for _ in self._limits]
        for names, ids, mask, most in self._batches:
            written = self._model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False
            )
            for n, tokens in zip(names, written[:, ids.shape[1] :].tolist(), strict=True):
                found[n] = tokens[: self._limits[n]]
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = _parser().parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    size = options.size or ("full" if on_gpu else "small")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = build(size, device, dtype)
    asked = conversations(options.conversations, options.answers, SIZES[size]["vocab_size"], device)
    fields = {
        "size": size,
        "answers": options.answers,
        "slots": options.slots,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }
    systems = [
        _System("effasr", cache, Ours(model, asked, options.slots, paged=cache == "paged"))
        for cache in options.caches or (["paged"] if on_gpu else ["contiguous"])
    ]
    if options.peer:
        systems.append(_System("transformers", "contiguous", Peer(model, asked, options.slots)))
    # Also the warm-up.
    expected = systems[0].answers.answer()
    for one in systems:
        one.agreement = agreement(expected, one.answers.answer())
        if one.agreement < LEAST_AGREEMENT[dtype]:
            sys.stderr.write(
                f"bench_conversations: only {one.agreement:.4f} of the tokens of {one.name} "
                f"({one.cache} cache) agree with those of the first system: nothing is timed.\n"
            )
            return 1
    clock = Clock(device)
    for _ in range(options.repeats):
        for one in systems:
            one.time(clock, device)
    for one in systems:
        found = dict.fromkeys(COLUMNS, "") | fields | one.row(asked) | provenance(device)
        sys.stdout.write(_described(found) + "\n")
        if options.output is not None:
            rows.append(options.output, COLUMNS, found)
    return 0


@dataclass
class _System:
    """What is timed, and the times so far."""

    name: str
    cache: str
    answers: Ours | Peer
    agreement: float = 1.0
    times: list[float] = field(default_factory=list)
    peak_mb: int | None = None

    def time(self, clock: Clock, device: torch.device) -> None:
        """Time one pass, and on a GPU read the most memory that it takes at a time."""
        on_gpu = device.type == "cuda"
        before = torch.cuda.memory_allocated(device) if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        began = clock.now()
        self.answers.answer()
        self.times.append(clock.now() - began)
        if on_gpu:
            taken = torch.cuda.max_memory_allocated(device) - before
            self.peak_mb = round(taken / 2**20)

    def row(self, asked: Asked) -> dict[str, Any]:
        """Return the columns of the measured values."""
        p50 = statistics.median(self.times)
        low, high = p50, p50
        if len(self.times) > 1:
            low, *_, high = statistics.quantiles(self.times, n=5, method="inclusive")
        tokens = sum(asked.limits)
        return {
            "system": self.name,
            "cache": self.cache,
            "conversations": len(asked.limits),
            "rows": sum(asked.batch.token_lengths),
            "tokens": tokens,
            "tokens_per_s": round(tokens / p50, 1),
            "p20_s": round(low, 4),
            "p50_s": round(p50, 4),
            "p80_s": round(high, 4),
            "peak_mb": "" if self.peak_mb is None else self.peak_mb,
            "agreement": round(self.agreement, 5),
        }


def _described(one: dict[str, Any]) -> str:
    memory = f", peak {one['peak_mb']} MB" if one["peak_mb"] else ""
    return (
        f"{one['answers']}: {one['system']:12} {one['cache']:10} {one['slots']} slots: "
        f"{one['tokens_per_s']:,} "
        f"tokens/s, {one['p50_s']} s ({one['p20_s']} to {one['p80_s']}), agreement "
        f"{one['agreement']}{memory}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(SIZES), help="small on a CPU, full on a GPU")
    parser.add_argument("--slots", type=int, default=16, help="conversations at a time")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--answers", choices=["transcripts", REPLIES], default="transcripts")
    parser.add_argument(
        "--caches", nargs="+", choices=["contiguous", "paged"], help="default: that of the device"
    )
    parser.add_argument("--peer", action="store_true", help="transformers' generate, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="CSV to append to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
