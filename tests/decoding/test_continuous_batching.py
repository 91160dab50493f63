from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effasr.data.collate import Example, collate
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.decoding.decoded import Decoded
from effasr.model.asr import ASRModel
from effasr.model.decoder import Decoder, DecoderLayer
from effasr_kernels import PackedSequence, pack
from tests.decoding.cases import without_caches
from tests.support import preloaded

ROOM = 64


def _eager(step):
    """Stands in for the recording of a step: its output lies in one place, as a graph's does."""
    output = torch.zeros_like(step())

    def replay() -> None:
        output.copy_(step())

    return replay, output


KINDS = {"contiguous": {}, "paged": {"paged": True}, "recorded": {"paged": True, "capture": _eager}}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True)
class Said:
    """An utterance: its speech is drawn from the seed."""

    seed: int
    frames: int
    prompt: tuple[int, ...]
    limit: int

    def speech(self) -> torch.Tensor:
        return torch.randn(self.frames, 32, generator=torch.Generator().manual_seed(self.seed))


@st.composite
def utterances(draw) -> Said:
    prompt = draw(st.lists(st.integers(3, 20), min_size=1, max_size=9))
    limit = draw(st.integers(1, 20))
    return Said(draw(st.integers(0, 99)), draw(st.integers(0, 50)), tuple(prompt), limit)


def alone(model: ASRModel, said: Said, eos_id: int) -> Decoded:
    return without_caches(model, pack([said.speech()]), said.prompt, said.limit, eos_id)


def _submit(engine: Engine, every: list[Said], first: int = 0) -> None:
    names = range(first, first + len(every))
    engine.submit(
        pack([item.speech() for item in every]),
        [Utterance(n, item.prompt, item.limit) for n, item in zip(names, every, strict=True)],
    )


@EVERY_KIND
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    batches=st.lists(st.lists(utterances(), min_size=1, max_size=5), min_size=1, max_size=3),
    slots=st.integers(1, 6),
    ahead=st.integers(0, 3),
    budget=st.one_of(st.none(), st.integers(1, 120)),
)
def test_tokens_are_those_of_each_alone(
    kind, batches, slots, ahead, budget, model, tokenizer
) -> None:
    options = dict(KINDS[kind])
    if options:
        options |= {"ahead": ahead, "pages": (slots + 4, slots + 4)}
    engine = Engine(
        model, tokenizer.eos_id, slots=slots, max_frames=50, frame_budget=budget, **options
    )
    each_item = [item for batch in batches for item in batch]
    matches, first = [], 0
    for batch in batches:
        _submit(engine, batch, first)
        first += len(batch)
        matches += engine.results(drain=False)
    matches += engine.results()
    assert engine.unfinished == []
    assert sorted(name for name, _ in matches) == list(range(len(each_item)))
    for name, result in matches:
        assert result == alone(model, each_item[name], tokenizer.eos_id)


MIXED = [
    Said(seed, frames, tuple(range(3, 4 + seed % 5)), limit)
    for seed, (frames, limit) in enumerate(
        [(40, 20), (3, 1), (17, 9), (0, 5), (50, 30), (8, 2), (33, 14), (21, 25), (5, 7)]
    )
]


@EVERY_KIND
def test_finished_utterances_leave_and_others_enter(kind, model, tokenizer) -> None:
    engine = Engine(model, tokenizer.eos_id, slots=4, max_frames=50, **KINDS[kind])
    seen, waiting = [], []

    def watched() -> torch.Tensor:
        seen.append([None if seat is None else seat.name for seat in engine._slots])
        waiting.append(len(engine.unfinished) - sum(name is not None for name in seen[-1]))
        return step()

    step, engine._run = engine._run, watched
    _submit(engine, MIXED)
    order = [name for name, _ in engine.results()]
    assert order != sorted(order)
    assert sorted(order) == list(range(len(MIXED)))
    # The longest speech enters first, and nobody changes places while others wait.
    assert sorted(seen[0]) == sorted([0, 4, 6, 7])
    for before, after, remaining in zip(seen, seen[1:], waiting, strict=False):
        stay = set(before) & set(after) - {None}
        assert not remaining or all(before.index(name) == after.index(name) for name in stay)
    assert all(None not in row for row, remaining in zip(seen, waiting, strict=True) if remaining)
    assert len(set(waiting)) > 3
    assert len(seen) < sum(len(item.prompt) + item.limit for item in MIXED) / 2


@pytest.mark.parametrize("prompts", [(1, 1, 1), (1, 2, 1)])
def test_prompts_of_one_token_are_not_read_before_the_first_step(
    prompts, model, tokenizer, monkeypatch
) -> None:
    rows, read = [], DecoderLayer.read
    monkeypatch.setattr(DecoderLayer, "read", lambda *a: rows.append(a[2].lengths) or read(*a))
    engine = Engine(model, tokenizer.eos_id, slots=4, max_frames=50)
    each_item = [Said(n, 30, tuple(range(3, 3 + length)), 9) for n, length in enumerate(prompts)]
    _submit(engine, each_item)
    result = dict(engine.results())
    assert rows == ([] if max(prompts) == 1 else [(0, 1, 0)])
    assert result == {n: alone(model, item, tokenizer.eos_id) for n, item in enumerate(each_item)}


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the order of sums is MKL's")
@EVERY_KIND
def test_logits_are_the_same_to_the_bit_in_any_company(
    kind, model, tokenizer, noise, monkeypatch
) -> None:
    """From the audio on: of utterances of at least four frames, for MKL treats fewer rows apart.

    Of prompts, it must not matter how few tokens are read at once.
    """
    hidden, likeliest = [], Decoder.likeliest

    def watched(decoder, x, classes=None):
        hidden.append(x.clone())
        return likeliest(decoder, x, classes)

    monkeypatch.setattr(Decoder, "likeliest", watched)
    seconds = (0.5, 2.1, 0.7, 3.3, 1.2, 2.6)
    examples = [
        Example(str(n), noise(length, seed=n), list(range(3, 3 + prompt)), [], monotonic=False)
        for n, (length, prompt) in enumerate(zip(seconds, (2, 5, 10, 1, 4, 3), strict=True))
    ]

    @torch.no_grad()
    def states(names, slots: int) -> dict[int, torch.Tensor]:
        options = {**KINDS[kind], "ahead": 0}
        engine = Engine(model, tokenizer.eos_id, slots=slots, max_frames=50, **options)
        matches = defaultdict(list)
        run = engine._run

        def step() -> torch.Tensor:
            result = run()
            for row, seat in enumerate(engine._slots):
                if seat is not None:
                    matches[seat.name].append(hidden[-1][row])
            return result

        engine._run = step
        batch = collate([examples[n] for n in names], eos_id=3, pad_id=2)
        engine.submit(model.encode(batch), [Utterance(n, examples[n].prompt, 20) for n in names])
        list(engine.results())
        return {name: torch.stack(rows) for name, rows in matches.items()}

    together = states(range(6), slots=6)
    assert len({len(rows) for rows in together.values()}) > 2
    for names, slots in [
        *(((name,), 1) for name in range(6)),
        ((4, 0), 1),
        ((5, 3, 1, 0), 3),
        ((2, 4, 3), 9),
        ((3, 2, 5, 0, 4, 1), 2),
    ]:
        for name, rows in states(names, slots).items():
            assert torch.equal(rows, together[name]), name


def test_the_narrow_precision_of_a_decoder_shares_the_rest(model) -> None:
    decoder = model.decoder
    cast = decoder.cast(torch.bfloat16)
    assert cast.layers[0].mlp.linear1.weight.dtype == torch.bfloat16
    assert cast.output_weight.dtype == torch.bfloat16
    assert cast.norm.weight.data_ptr() == decoder.norm.weight.data_ptr()
    assert cast.embed_tokens.weight.data_ptr() == decoder.embed_tokens.weight.data_ptr()
    assert decoder.layers[0].mlp.linear1.weight.dtype == torch.float32
    assert not any(module.training for module in cast.modules())


@pytest.mark.parametrize(
    ("said", "match"),
    [
        (Said(0, 51, (3,), 4), r"at most 50 frames .* has 51"),
        (Said(0, 50, (3,), ROOM), rf"1 to {ROOM} tokens.*has {ROOM + 1} with a prompt of 1"),
        (Said(0, 50, (), 3), r"has 3 with a prompt of 0"),
    ],
)
def test_what_fits_into_no_slot_is_refused(said, match, model, tokenizer) -> None:
    engine = Engine(model, tokenizer.eos_id, slots=2, max_frames=50)
    with pytest.raises(ValueError, match=match):
        _submit(engine, [said])
    with pytest.raises(ValueError, match="`slots` must be at least 1, but is 0"):
        Engine(model, tokenizer.eos_id, slots=0, max_frames=50)


def test_sequences_past_the_utterances_are_not_decoded(model, tokenizer) -> None:
    engine = Engine(model, tokenizer.eos_id, slots=2, max_frames=50)
    encoded: PackedSequence = pack([item.speech() for item in MIXED[:3]], rows=99)
    engine.submit(encoded, [Utterance("only", MIXED[0].prompt, 5)])
    ((name, result),) = engine.results()
    assert name == "only"
    assert result.tokens == alone(model, MIXED[0], tokenizer.eos_id).tokens[:5]


def test_a_step_stays_on_the_device_and_asks_it_nothing() -> None:
    # In a process of its own: torch can be told of one more device only once, and for good.
    done = preloaded.finished(Path(__file__).with_name("fake_gpu_step.py"))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "4 engines" in done.stdout
