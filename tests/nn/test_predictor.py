"""Predictors of packed transcripts, against reading one transcript after the other."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from effasr.nn.predictor import LSTMPredictor, PaddedView, StatelessPredictor, after_start, lstm
from effasr_kernels import PackedLayout

LABELS, WIDTH = 7, 6
LAYOUTS = {
    "exact": PackedLayout.from_lengths((3, 0, 5, 1)),
    "static": PackedLayout.from_lengths(
        (3, 0, 5, 1, 4), rows=20, num_sequences=9, static_max_seqlen=6
    ),
    "one": PackedLayout.from_lengths((4,)),
    "none empty": PackedLayout.from_lengths((0,)),
    "nothing said": PackedLayout.from_lengths((0, 0), rows=5, num_sequences=3, static_max_seqlen=2),
    "no sequence": PackedLayout.from_lengths(()),
    "long": PackedLayout.from_lengths((9, 1, 1, 1, 1, 1, 1, 9, 9)),
}
KINDS = {
    "lstm": lambda: LSTMPredictor(LABELS, WIDTH, 2),
    "one layer": lambda: LSTMPredictor(LABELS, WIDTH, 1),
    "stateless": lambda: StatelessPredictor(LABELS, WIDTH, 2),
    "no context": lambda: StatelessPredictor(LABELS, WIDTH, 1),
    "context 3": lambda: StatelessPredictor(LABELS, WIDTH, 3),
}


def make(kind):
    torch.manual_seed(0)
    return KINDS[kind]().double()


def make_labels(layout):
    return torch.randint(LABELS, (layout.rows,), generator=torch.Generator().manual_seed(1))


def pieces(x, layout):
    rows = layout.lengthened(1)
    return list(x[: rows.total].split(rows.lengths))


def alone(predictor, said):
    """A transcript read label by label, with torch's own modules: (U + 1, P)."""
    embedded = predictor.embedding(torch.tensor([LABELS, *said]))
    if isinstance(predictor, LSTMPredictor):
        theirs = nn.LSTM(WIDTH, WIDTH, predictor.lstm.layers, batch_first=True).double()
        weights = dict(predictor.lstm.named_parameters())
        return torch.func.functional_call(theirs, weights, (embedded[None],))[0][0]
    padded = nn.functional.pad(embedded, (0, 0, predictor.context - 1, 0))
    return (padded.unfold(0, predictor.context, 1) * predictor.taps).sum(-1).relu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_transcript_is_read_as_if_alone(kind, name):
    layout, predictor = LAYOUTS[name], make(kind)
    labels = make_labels(layout)
    out = predictor(labels, layout)
    assert out.shape == (layout.rows + layout.num_sequences, WIDTH)
    assert out.isfinite().all()
    upstream = [torch.randn_like(piece) for piece in pieces(out, layout)]
    message = [item.tolist() for item in labels[: layout.total].split(layout.lengths)]
    expected = [alone(predictor, item) for item in message]
    total, requested = torch.zeros(()), torch.zeros(())
    for x, y, weight in zip(pieces(out, layout), expected, upstream, strict=True):
        torch.testing.assert_close(x, y)
        total, requested = total + (x * weight).sum(), requested + (y * weight).sum()
    if not message:
        return
    parameters = list(predictor.parameters())
    for x, y in zip(
        torch.autograd.grad(total, parameters),
        torch.autograd.grad(requested, parameters),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_label_by_label_is_the_same(kind):
    layout, predictor = LAYOUTS["one"], make(kind)
    labels = make_labels(layout)
    state = predictor.begin(2)
    for row, label in zip(predictor(labels, layout), [LABELS, *labels.tolist()], strict=True):
        out, state = predictor.step(torch.tensor([label, label]), state)
        torch.testing.assert_close(out, row.expand(2, -1))
        assert all(part.shape[0] == 2 for part in state)


def test_lanes_have_one_size_whatever_the_lengths():
    sizes = set()
    for lengths in ((6, 6, 6), (1,) * 9, (0, 6, 0, 6), ()):
        layout = PackedLayout.from_lengths(lengths, rows=20, num_sequences=9, static_max_seqlen=6)
        lanes = PaddedView.of(layout, 6)
        sizes.add((lanes.count, lanes.steps))
        slots = lanes.slots[: layout.total]
        assert len(set(slots.tolist())) == layout.total
        free = lanes.free().flatten()
        assert not free[slots].any()
        assert free.sum() == lanes.count * lanes.steps - layout.total
        starts = slots[layout.cu_seqlens[:-1].long()[torch.tensor(layout.lengths) > 0]]
        assert free[starts - 1].all(), "every sequence has a free slot in front"
    assert len(sizes) == 1


def test_a_reset_forgets_all():
    torch.manual_seed(0)
    weights = [3 * torch.randn(shape) for shape in ((20, 4), (20, 5), (20,), (20,))]
    x = 10 * torch.randn(1, 7, 4)
    resets = torch.zeros(1, 7, dtype=torch.bool)
    resets[0, 3] = True
    out = lstm(x, resets, weights)
    assert not out[0, 3].any()
    other = x.clone()
    other[:, :4] = 10 * torch.randn(1, 4, 4)
    before = lstm(other, resets, weights)
    assert not torch.equal(out[:, :3], before[:, :3])
    assert torch.equal(out[:, 4:], before[:, 4:])
    # Products of other numbers of rows may round otherwise.
    torch.testing.assert_close(out[:, 4:], lstm(x[:, 4:], resets[:, 4:], weights))


def test_the_work_is_counted():
    layout, predictor = LAYOUTS["exact"], make("lstm").float()
    lanes = PaddedView.of(layout.lengthened(1), 6)
    with FlopCounterMode(display=False) as counter:
        predictor(make_labels(layout), layout).sum().backward()
    products = 2 * 2 * 4 * WIDTH * WIDTH
    assert counter.get_total_flops() == 3 * 2 * lanes.count * lanes.steps * products


def test_the_start_symbol_comes_first():
    layout = PackedLayout.from_lengths((2, 0, 1), rows=4, num_sequences=4)
    labels = torch.tensor([1, 2, 3, 5])
    assert after_start(labels, layout, 9).tolist() == [9, 1, 2, 9, 9, 3, 9, 9]
