"""Run as ``python check_extension.py FOLDER``: the library built there, as it is used.

A process of its own: a library once loaded is not replaced.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import effasr_kernels
from effasr_kernels.runtime import native
from effasr_kernels.shared import lattice
from effasr_kernels.transducer_loss.lattice import occupancies
from tests.csrc.native import ctc_reference, offsets, random_planes, random_transcript

FRAMES, LABELS = (300, 0, 7, 120, 40), (200, 0, 12, 31, 0)


def check_transducer() -> None:
    """Against the reference; in place and not, twice the same bits."""
    planes = [random_planes(t, u) for t, u in zip(FRAMES, LABELS, strict=True)]
    lengths = offsets(FRAMES), offsets(LABELS)
    nodes = lattice.node_offsets(*lengths)
    log_blank, log_label = (
        torch.cat([x.flatten() for x in kind]) for kind in zip(*planes, strict=True)
    )
    arguments = log_blank, log_label, *lengths, nodes[:-1]
    found = lattice.transducer_occupancies(*arguments)
    again = lattice.transducer_occupancies(*arguments)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    assert torch.equal(lattice.transducer_log_likelihood(*arguments), found[0])
    replaced = lattice.transducer_occupancies(*arguments, in_place=True)
    assert replaced[1].data_ptr() == log_blank.data_ptr()
    assert all(torch.equal(x, y) for x, y in zip(found, replaced, strict=True))
    for n, (blank, label) in enumerate(planes):
        own = slice(int(nodes[n]), int(nodes[n + 1]))
        results = [x[own].view_as(blank) for x in found[1:]]
        if not len(blank):
            assert found[0][n] == 0.0
            continue
        expected = occupancies(blank, label[:, :-1])
        assert abs(float(found[0][n]) - float(expected[0])) < 3e-6
        for x, y in zip(results, expected[1:], strict=True):
            torch.testing.assert_close(x.double(), y, rtol=5e-6, atol=1e-9)


def check_ctc() -> None:
    """Against the reference, with targets of either width."""
    shapes = [(t, min(u, t // 2)) for t, u in zip(FRAMES, LABELS, strict=True)]
    sequences = [random_transcript(*shape) for shape in shapes]
    columns = max(u for _, u in shapes) + 1
    table = torch.full((sum(FRAMES), columns), torch.nan)
    cu_frames, cu_targets = offsets(FRAMES), offsets([u for _, u in shapes])
    for n, (scores, _, _) in enumerate(sequences):
        table[cu_frames[n] : cu_frames[n + 1], : scores.shape[1]] = scores
    normalizers = torch.cat([x for _, x, _ in sequences])
    targets = torch.cat([y for _, _, y in sequences])
    for y in (targets, targets.int()):
        arguments = table, normalizers, y, cu_frames, cu_targets
        total, found = lattice.ctc_occupancies(*arguments)
        assert torch.equal(lattice.ctc_log_likelihood(*arguments), total)
        for n, (scores, normalizer, labels) in enumerate(sequences):
            expected, shares = ctc_reference(scores - normalizer[:, None], labels)
            assert abs(float(total[n]) - float(expected)) < 3e-6
            own = found[cu_frames[n] : cu_frames[n + 1], : len(labels) + 1]
            torch.testing.assert_close(own.double(), shares.double(), rtol=5e-6, atol=1e-9)


def check_errors() -> None:
    """One line that says which argument is wrong, and how."""
    x, lengths = torch.zeros(6), offsets([3])
    first = lengths[:1].long()

    def raised(call: Callable[[], object]) -> str:
        try:
            call()
        except ValueError as error:
            return str(error)
        raise AssertionError("no error")

    def transducer(a: Tensor, b: Tensor, cu: Tensor, nodes: Tensor) -> str:
        return raised(lambda: lattice.transducer_log_likelihood(a, b, cu, cu, nodes))

    assert "`log_blank` must be float32" in transducer(x.double(), x, lengths, first)
    assert "`log_label` must have shape" in transducer(x, x[:5], lengths, first)
    assert "`cu_frames` must be int32" in transducer(x, x, lengths.long(), first)
    assert "`first_nodes` must have shape" in transducer(x, x, lengths, first.repeat(2))
    assert "must be contiguous" in transducer(x.repeat(2)[::2], x, lengths, first)
    assert "`first_nodes` must have ranges within the 6 elements" in transducer(
        x, x, lengths, first
    )
    assert "`log_blank` must be on a CPU" in transducer(x.to("meta"), x, lengths, first)


def main(folder: str) -> None:
    """Make the build a part of the package of this checkout, then check it."""
    effasr_kernels.__path__.append(str(Path(folder) / "effasr_kernels"))
    assert native.unsupported_reason() is None, native.unsupported_reason()
    torch.manual_seed(0)
    check_transducer()
    check_ctc()
    check_errors()
    sys.stdout.write("extension: right\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
