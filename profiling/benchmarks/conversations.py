"""Answers of a language model by continuous batching, and against transformers' generate: tokens/s.

    python profiling/bench.py conversations [--size small|full] [--slots 16] [--conversations 64]
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

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import harness
from benchmarks.speech import MODELS, agreement
from benchmarks.workload import FRAMES_PER_SECOND, LISTED, TOKENS_PER_SECOND, read_durations
from effasr.config import from_mapping
from effasr.data.conversation.batch import ConversationBatch
from effasr.data.conversation.collate import asking, collate_conversations
from effasr.data.features.config import FeatureConfig
from effasr.decoding.language_model.engine import ConversationEngine
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig

STACK = 4
INSTRUCTION = 24  # rows of a conversation that are not speech
REPLIES = "replies"
LEAST_AGREEMENT = {torch.float32: 0.9, torch.bfloat16: 0.1}
COLUMNS = (
    *("system", "size", "answers", "cache", "slots", "conversations", "rows", "tokens"),
    *("tokens_per_s", "p20_s", "p50_s", "p80_s", "peak_mb", "agreement", "threads", "dtype"),
    *harness.VERSIONS,
)
SIZES: dict[str, dict[str, Any]] = MODELS["qwen3"]


@dataclass(frozen=True)
class Conversations:
    batch: ConversationBatch
    limits: list[int]  # tokens of each answer


def build(size: str, device: torch.device, dtype: torch.dtype) -> ASRModel:
    torch.manual_seed(0)
    architecture = json.dumps(SIZES[size])
    settings = {"architecture": architecture, "stack": STACK, "weights": "random"}
    config = from_mapping(ModelConfig, MODELS["conversations"] | {"language_model": settings})
    with torch.device(device):
        model = ASRModel(config, SIZES[size]["vocab_size"])
    return model.to(device, dtype).eval()


def draw(count: int, answers: str, vocabulary: int, device: torch.device) -> Conversations:
    """Draw conversations as long as those about real utterances, and lengths of answers."""
    rng = random.Random(0)
    durations = rng.choices(read_durations(LISTED), k=count)
    lengths = [INSTRUCTION + round(s * FRAMES_PER_SECOND / STACK) for s in durations]
    examples = [
        asking(str(n), [rng.randrange(3, vocabulary) for _ in range(length)])
        for n, length in enumerate(lengths)
    ]
    framing = FeatureConfig(mel_bins=16).framing
    batch = collate_conversations(examples, stack=STACK, pad_id=0, framing=framing).to(device)
    if answers == REPLIES:
        rng.shuffle(durations)
    limits = [max(1, round(TOKENS_PER_SECOND * seconds)) for seconds in durations]
    return Conversations(batch, limits)


Answer = Callable[[], list[list[int]]]
"""Returns the tokens of every answer."""


def ours(model: ASRModel, questions: Conversations, slots: int, *, paged: bool) -> Answer:
    def answer() -> list[list[int]]:
        engine = ConversationEngine(model, (), slots=slots, paged=paged)
        engine.submit(questions.batch, questions.limits, range(len(questions.limits)))
        results = dict(engine.results())
        return [list(results[name].tokens) for name in range(len(results))]

    return answer


def peer(model: ASRModel, questions: Conversations, slots: int) -> Answer:
    """Transformers' model with the same weights, in padded batches of neighbours in length."""
    from transformers import AutoConfig, AutoModelForCausalLM

    language_model = model.language_model
    assert language_model is not None
    config = AutoConfig.for_model(**json.loads(language_model.config.architecture or "{}"))
    theirs: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    theirs.to(language_model.output_weight.device, language_model.output_weight.dtype)
    state = language_model.state_dict()
    names = {peer_name: state[name] for name, peer_name in language_model.causal_names()}
    theirs.load_state_dict(names, strict=False)
    theirs.tie_weights()
    theirs.eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    lengths = questions.batch.token_lengths
    rows = questions.batch.tokens.values[: sum(lengths)].split(list(lengths))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    batches = []
    for begin in range(0, len(order), slots):
        chosen = order[begin : begin + slots]
        longest = max(lengths[n] for n in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.int64, device=rows[0].device)
        mask = torch.zeros_like(ids)
        for row, n in enumerate(chosen):
            ids[row, longest - lengths[n] :] = rows[n]
            mask[row, longest - lengths[n] :] = 1
        batches.append((chosen, ids, mask, max(questions.limits[n] for n in chosen)))

    @torch.no_grad()
    def answer() -> list[list[int]]:
        answers: list[list[int]] = [[] for _ in questions.limits]
        for chosen, ids, mask, most in batches:
            written = theirs.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False
            )
            for n, tokens in zip(chosen, written[:, ids.shape[1] :].tolist(), strict=True):
                answers[n] = tokens[: questions.limits[n]]
        return answers

    return answer


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("conversations", __doc__)
    add = parser.add_argument
    add("--size", choices=list(SIZES), help="small on a CPU, full on a GPU")
    add("--slots", type=int, default=16, help="conversations at a time")
    add("--conversations", type=int, default=64)
    add("--answers", choices=["transcripts", REPLIES], default="transcripts")
    caches = ["contiguous", "paged"]
    add("--caches", nargs="+", choices=caches, help="default: that of the device")
    add("--peer", action="store_true", help="transformers' generate, too")
    add("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    device = harness.default_device()
    on_gpu = device.type == "cuda"
    size = options.size or ("full" if on_gpu else "small")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model, slots = build(size, device, dtype), options.slots
    questions = draw(options.conversations, options.answers, SIZES[size]["vocab_size"], device)
    systems = {
        ("effasr", cache): ours(model, questions, slots, paged=cache == "paged")
        for cache in options.caches or (["paged"] if on_gpu else ["contiguous"])
    }
    if options.peer:
        systems["transformers", "contiguous"] = peer(model, questions, slots)
    # Also the warm-up.
    answers = {key: answer() for key, answer in systems.items()}
    expected = next(iter(answers.values()))
    shares = {key: agreement(expected, tokens) for key, tokens in answers.items()}
    for (system, cache), share in shares.items():
        if share < LEAST_AGREEMENT[dtype]:
            harness.complain(
                f"bench conversations: only {share:.4f} of the tokens of {system} ({cache} cache) "
                "agree with those of the first system: nothing is timed."
            )
            return 1
    held = torch.cuda.memory_allocated(device) if on_gpu else 0
    calls = [lambda number, answer=answer: answer() for answer in systems.values()]
    turns = list(harness.in_turns(calls, options.repeats, device))
    tokens = sum(questions.limits)
    table = harness.Table(COLUMNS, options.output, device)
    for index, ((system, cache), share) in enumerate(shares.items()):
        mine = [turn for turn in turns if turn.system == index]
        p20, p50, p80 = harness.percentiles([turn.seconds for turn in mine])
        row = {
            **{"system": system, "size": size, "answers": options.answers, "cache": cache},
            **{"slots": slots, "conversations": len(questions.limits), "tokens": tokens},
            "rows": sum(questions.batch.token_lengths),
            "tokens_per_s": round(tokens / p50, 1),
            **{"p20_s": round(p20, 4), "p50_s": round(p50, 4), "p80_s": round(p80, 4)},
            "agreement": round(share, 5),
            **{"threads": torch.get_num_threads(), "dtype": harness.dtype_name(dtype)},
        }
        if on_gpu:
            row["peak_mb"] = round((mine[-1].peak_bytes - held) / 2**20)
        memory = f", peak {row['peak_mb']} MB" if on_gpu else ""
        table.add(
            row,
            f"{row['answers']}: {system:12} {cache:10} {slots} slots: {row['tokens_per_s']:,} "
            f"tokens/s, {row['p50_s']} s ({row['p20_s']} to {row['p80_s']}), agreement "
            f"{row['agreement']}{memory}",
        )
    return 0
