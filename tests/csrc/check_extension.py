"""Run as ``python check_extension.py FOLDER BACKEND``: the extension built there, as it is used.

A process of its own: an extension once loaded can be neither replaced nor unloaded.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import effasr_kernels
from effasr_kernels.shared import lattice
from effasr_kernels.transducer_loss.lattice import occupancies
from tests.csrc.native import ctc_reference, offsets, random_planes, random_transcript, skew, unskew

FRAMES, LABELS = (300, 0, 7, 120, 40), (200, 0, 12, 31, 0)


def check_transducer(backend: lattice.Extension, device: torch.device) -> None:
    """Against the reference; every layout, in place and not, twice the same bits."""
    planes = [random_planes(t, u) for t, u in zip(FRAMES, LABELS, strict=True)]
    lengths = offsets(FRAMES).to(device), offsets(LABELS).to(device)
    nodes = lattice.node_offsets(*lengths)
    kinds = {"max_frames": max(FRAMES), "max_labels": max(LABELS), "backend": backend}
    for skewed in (False, True):
        log_blank, log_label = (
            torch.cat([(skew(x) if skewed else x).flatten() for x in kind]).to(device)
            for kind in zip(*planes, strict=True)
        )
        arguments = log_blank, log_label, *lengths, nodes[:-1]
        found = lattice.transducer_occupancies(*arguments, skewed=skewed, **kinds)
        again = lattice.transducer_occupancies(*arguments, skewed=skewed, **kinds)
        assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
        alone = lattice.transducer_log_likelihood(*arguments, skewed=skewed, **kinds)
        assert torch.equal(alone, found[0])
        replaced = lattice.transducer_occupancies(*arguments, skewed=skewed, in_place=True, **kinds)
        assert replaced[1].data_ptr() == log_blank.data_ptr()
        assert all(torch.equal(x, y) for x, y in zip(found, replaced, strict=True))
        for n, (blank, label) in enumerate(planes):
            own = slice(int(nodes[n]), int(nodes[n + 1]))
            results = [x[own].cpu().view_as(blank) for x in found[1:]]
            if not len(blank):
                assert found[0][n] == 0.0
                continue
            expected = occupancies(blank, label[:, :-1])
            assert abs(float(found[0][n]) - float(expected[0])) < 3e-6
            for x, y in zip(results, expected[1:], strict=True):
                x = unskew(x) if skewed else x
                torch.testing.assert_close(x.double(), y, rtol=5e-6, atol=1e-9)


def check_ctc(backend: lattice.Extension, device: torch.device) -> None:
    """Against the reference, with targets of either width."""
    shapes = [(t, min(u, t // 2)) for t, u in zip(FRAMES, LABELS, strict=True)]
    sequences = [random_transcript(*shape) for shape in shapes]
    columns = max(u for _, u in shapes) + 1
    table = torch.full((sum(FRAMES), columns), torch.nan)
    cu_frames, cu_targets = offsets(FRAMES), offsets([u for _, u in shapes])
    for n, (scores, _, _) in enumerate(sequences):
        table[cu_frames[n] : cu_frames[n + 1], : scores.shape[1]] = scores
    table, normalizers = table.to(device), torch.cat([x for _, x, _ in sequences]).to(device)
    targets = torch.cat([y for _, _, y in sequences]).to(device)
    for y in (targets, targets.int()):
        arguments = table, normalizers, y, cu_frames.to(device), cu_targets.to(device)
        kinds = {"max_frames": max(FRAMES), "backend": backend}
        total, found = lattice.ctc_occupancies(*arguments, **kinds)
        assert torch.equal(lattice.ctc_log_likelihood(*arguments, **kinds), total)
        for n, (scores, normalizer, labels) in enumerate(sequences):
            expected, shares = ctc_reference(scores - normalizer[:, None], labels)
            assert abs(float(total[n]) - float(expected)) < 3e-6
            own = found[cu_frames[n] : cu_frames[n + 1], : len(labels) + 1].cpu()
            torch.testing.assert_close(own.double(), shares.double(), rtol=5e-6, atol=1e-9)


def check_errors(backend: lattice.Extension, device: torch.device) -> None:
    """One line that says which argument is wrong, and how."""
    x, lengths = torch.zeros(6, device=device), offsets([3]).to(device)
    first, kinds = lengths[:1].long(), {"max_frames": 3, "max_labels": 1, "backend": backend}

    def raised(call: Callable[[], object]) -> str:
        try:
            call()
        except ValueError as error:
            return str(error)
        raise AssertionError("no error")

    def transducer(a: Tensor, b: Tensor, cu: Tensor, nodes: Tensor) -> str:
        return raised(lambda: lattice.transducer_log_likelihood(a, b, cu, cu, nodes, **kinds))

    assert "`log_blank` must be Float" in transducer(x.double(), x, lengths, first)
    assert "`log_label` must have shape" in transducer(x, x[:5], lengths, first)
    assert "`cu_frames` must be Int" in transducer(x, x, lengths.long(), first)
    assert "`first_nodes` must have shape" in transducer(x, x, lengths, first.repeat(2))
    assert "must be contiguous" in transducer(x.repeat(2)[::2], x, lengths, first)
    if device.type == "cpu":
        assert "`first_nodes` must lie in the 6 elements" in transducer(x, x, lengths, first)
    else:
        assert "must be on a cuda device" in transducer(x.cpu(), x, lengths, first)


def main(folder: str, backend: lattice.Extension) -> None:
    """Make the build a part of the package of this checkout, then check it."""
    effasr_kernels.__path__.append(str(Path(folder) / "effasr_kernels"))
    assert lattice.why_not(backend) is None, lattice.why_not(backend)
    device = torch.device(backend.removesuffix("-extension"))
    torch.manual_seed(0)
    streams = [None] if device.type == "cpu" else [None, torch.cuda.Stream()]
    for stream in streams:
        with torch.cuda.stream(stream):
            check_transducer(backend, device)
            check_ctc(backend, device)
    check_errors(backend, device)
    sys.stdout.write("extension: right\n")


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
