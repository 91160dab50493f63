"""Greedy search of a transducer with durations."""

from typing import Any

import pytest
import torch
from torch import Tensor

from effasr.data.batch import StaticShape
from effasr.data.collate import Example, collate
from effasr.data.prompt import Prompt
from effasr.decoding.config import DecodingConfig
from effasr.decoding.greedy import choose_method, decode
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.asr import ASRModel
from effasr.model.transducer import Transducer, TransducerConfig
from effasr_kernels import PackedSequence, pack

LABELS, WIDTH, JOINT = 6, 5, 7
DURATIONS = (0, 1, 2, 5)


def make_head(predictor: Any, seed: int, *, blank: float, stay: float) -> Transducer:
    """Weights large enough for symbols and durations to depend on all that they should."""
    torch.manual_seed(seed)
    config = TransducerConfig(predictor=predictor, width=8, joint=JOINT, durations=DURATIONS)
    head = Transducer(config, WIDTH, LABELS).double().eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (1.5 if parameter.ndim > 1 else 0.5))
        head.output.bias[LABELS] += blank
        head.output.bias[LABELS + 1] += stay
    return head


def make_frames(*lengths: int, seed: int) -> PackedSequence:
    draw = torch.Generator().manual_seed(seed)
    return pack([2 * torch.randn(n, WIDTH, generator=draw, dtype=torch.float64) for n in lengths])


@torch.no_grad()
def step_by_step(head: Transducer, frames: Tensor, max_symbols: int) -> tuple[list[int], set[str]]:
    """The definition, for one utterance, with whole transcripts every time; and what occurred."""
    projected = head.encoder_projection(frames)
    said: list[int] = []
    seen = set[str]()
    at = here = 0
    while at < len(projected):
        labels = pack([torch.tensor(said, dtype=torch.int64)])
        predicted = head.predictor_projection(head.predictor(labels.values, labels.layout))
        logits = head.logits(projected[at], predicted[-1])
        symbol = int(logits[: LABELS + 1].argmax())
        lasts = DURATIONS[int(logits[LABELS + 1 :].argmax())]
        if symbol == LABELS:
            seen.add(f"blank of {lasts}")
            lasts = max(lasts, 1)
        else:
            said.append(symbol)
            here += 1
            seen.add(f"label of {lasts}")
            if lasts == 0 and here == max_symbols:
                seen.add("too many labels")
                lasts = 1
        at += lasts
        here = 0 if lasts else here
        if at > len(projected):
            seen.add("past the end")
    return said, seen


@pytest.mark.parametrize("predictor", ["lstm", "stateless"])
@pytest.mark.parametrize("max_symbols", [1, 2, 10])
@torch.no_grad()
def test_greedy_is_step_by_step(predictor: str, max_symbols: int) -> None:
    occurred = set[str]()
    for seed in range(6):
        head = make_head(predictor, seed, blank=1.0, stay=1.0)
        encoded = make_frames(5, 0, 1, 12, 3, 0, 30, seed=seed)
        found = transducer_greedy(head, encoded, max_symbols)
        for labels, frames in zip(found, encoded.unpack(), strict=True):
            expected, seen = step_by_step(head, frames, max_symbols)
            assert labels == expected
            occurred |= seen
    everything = {f"{symbol} of {d}" for symbol in ("blank", "label") for d in DURATIONS}
    assert occurred >= everything | {"too many labels", "past the end"}


@torch.no_grad()
def test_greedy_is_that_of_transformers() -> None:
    """Where no frame has so many labels that only one of the two stops."""
    parakeet = pytest.importorskip("transformers.models.parakeet")
    encoder: dict[str, Any] = {
        "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "subsampling_conv_channels": 4, "num_mel_bins": 16,
    }  # fmt: skip
    torch.manual_seed(6)
    config = parakeet.ParakeetTDTConfig(
        vocab_size=LABELS + 1, blank_token_id=LABELS, decoder_hidden_size=8, pad_token_id=0,
        num_decoder_layers=2, encoder_config=encoder, durations=[0, 1, 2, 3],
    )  # fmt: skip
    theirs = parakeet.ParakeetForTDT(config).eval()
    theirs.generation_config.decoder_start_token_id = LABELS
    for parameter in theirs.encoder.parameters():
        if parameter.ndim > 1:
            parameter.mul_(20)
    for part in (theirs.encoder_projector, theirs.decoder, theirs.joint):
        for parameter in part.parameters():
            parameter.normal_()
    theirs.decoder.decoder_projector.weight.mul_(3)
    theirs.joint.head.bias[LABELS] += 2
    # Among themselves durations stay as likely; its `generate` takes them for symbols otherwise.
    theirs.joint.head.bias[LABELS + 1 :] -= 100
    head = Transducer(
        TransducerConfig(width=8, joint=8, layers=2, durations=(0, 1, 2, 3)), 16, LABELS
    ).eval()
    named = {
        "encoder_projection": theirs.encoder_projector,
        "predictor.embedding": theirs.decoder.embedding,
        "predictor.lstm": theirs.decoder.lstm,
        "predictor_projection": theirs.decoder.decoder_projector,
        "output": theirs.joint.head,
    }
    for name, module in named.items():
        head.get_submodule(name).load_state_dict(module.state_dict())
    lengths = [400, 160, 320, 96]
    features = torch.randn(4, max(lengths), 16)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    encoded = theirs.encoder(features, attention_mask=mask, output_attention_mask=True)
    frames = encoded.attention_mask.sum(1).tolist()
    packed = pack([x[:n] for x, n in zip(encoded.last_hidden_state, frames, strict=True)])
    found = transducer_greedy(head, packed, 100)
    different, occurred = set(), set()
    generated = theirs.generate(features, attention_mask=mask, max_new_tokens=500)
    for labels, row, passed, n in zip(
        found, generated.sequences.tolist(), generated.durations.tolist(), frames, strict=True
    ):
        steps, at = [], 0
        # Rows that are at their end go on until the last one is.
        for symbol, lasts in zip(row[1:], passed[1:], strict=True):
            if at < n:
                occurred.add((symbol == LABELS, lasts))
            if at < n and symbol != LABELS:
                steps.append(symbol)
            at += lasts
        assert at >= n, "the test needs searches that end"
        assert labels == steps
        different.add(tuple(labels))
    assert len(different) == 4
    assert occurred >= {(False, 0), (False, 1), (False, 2), (False, 3), (True, 1), (True, 3)}


def test_an_utterance_gives_the_same_tokens_in_any_company(tdt_model, tokenizer, noise) -> None:
    prompt = tokenizer.prompt(Prompt())
    examples = [
        Example(str(n), noise(seconds, seed=n), prompt, [], monotonic=True)
        for n, seconds in enumerate((0.3, 2.1, 0.7, 3.3, 1.2, 0.08))
    ]

    def tokens(chosen: list[Example], shape: StaticShape | None = None) -> list[tuple[int, ...]]:
        batch = collate(chosen, shape, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)
        found = decode(tdt_model, tokenizer, batch, [prompt] * len(chosen), DecodingConfig())
        return [result.tokens for result in found]

    together = tokens(examples)
    assert len(set(together)) > 4, "the test needs different texts"
    assert [tokens([example])[0] for example in examples] == together
    assert tokens(examples[::-1]) == together[::-1]
    shape = StaticShape(frame_budget=400, token_budget=80, max_sequences=11)
    assert tokens(examples, shape) == together


def test_it_is_what_such_a_model_is_decoded_with(tdt_model: ASRModel) -> None:
    assert choose_method(tdt_model, "auto") == "transducer"
