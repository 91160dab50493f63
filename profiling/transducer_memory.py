"""Memory and time of the transducer loss as the batch grows: packed in groups against padded whole.

    python profiling/transducer_memory.py [--batch 8 16 32 64] [--output ROWS.csv]

Forward and backward of joint, projection and loss, on utterances as long as real ones. The padded
way is the usual one: frames and labels are padded to the longest of the batch, the joint, the
logits and their log-probabilities (B, T, U + 1, V) exist whole, and autograd differentiates them;
``torchaudio`` differs in the loss alone. Before anything is timed, gradients are compared. What is
called peak is all that is made during a call, gradients included, inputs not. On a GPU the sizes
are those of training, on a CPU small.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench.contender import Padding
from bench.timing import measure
from bench.workload import LISTED, drawn_durations, read_durations
from bench_ops import provenance
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from effasr_kernels import PackedLayout
from effasr_kernels.transducer_loss import op, set_workspace

COLUMNS = [
    *("op", "backend", "batch", "frames", "labels", "joint", "classes", "dtype", "nodes"),
    *("padded_nodes", "p50_ms", "peak_bytes", "gradient_bytes", "workspace_bytes", "error"),
    *("device", "torch", "triton", "git", "date"),
]
TOKENS_PER_SECOND = 5.4
"""Of English, in 500 pieces: what turns 40 seconds into some 215 labels."""
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 2e-2, torch.float32: 1e-3}
_NOTHING = -1e30
Gradients = Sequence[Tensor]


@dataclass(frozen=True)
class Batch:
    """Utterances to train on.

    Attributes:
        frames: T_n, and where they are in ``encoded``.
        labels: U_n, and where they are in ``targets``.
        encoded: (T, J).
        predicted: (U + N, J).
        targets: (U,); the blank is class 0.
        weight: (V, J).
        bias: (V,).
    """

    frames: PackedLayout
    labels: PackedLayout
    encoded: Tensor
    predicted: Tensor
    targets: Tensor
    weight: Tensor
    bias: Tensor

    @property
    def nodes(self) -> int:
        """Of all lattices."""
        pairs = zip(self.frames.lengths, self.labels.lengths, strict=True)
        return sum(frames * (labels + 1) for frames, labels in pairs)

    @property
    def padded_nodes(self) -> int:
        """Of as many lattices of the longest lengths."""
        sequences = self.frames.num_sequences
        return sequences * self.frames.max_seqlen * (self.labels.max_seqlen + 1)


def draw(size: int, options: argparse.Namespace) -> Batch:
    """A batch of utterances of random durations; those of a smaller one are among them."""
    path = options.lengths or LISTED
    durations = read_durations(path) if path.exists() else drawn_durations()
    if options.seconds:
        durations = [options.seconds]
    generator = random.Random(1)
    drawn = [generator.choice(durations) for _ in range(size)]
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    frames = [max(1, round(x * options.frames_per_second)) for x in drawn]
    labels = [max(1, round(x * options.tokens_per_second)) for x in drawn]
    torch.manual_seed(0)
    rows = lambda *shape: torch.randn(*shape).to(device, dtype)
    scale = options.joint**-0.5
    return Batch(
        PackedLayout.from_lengths(frames, device),
        PackedLayout.from_lengths(labels, device),
        rows(sum(frames), options.joint),
        rows(sum(labels) + size, options.joint),
        torch.randint(1, options.classes, (sum(labels),)).to(device),
        rows(options.classes, options.joint) * scale,
        rows(options.classes) * scale,
    )


def packed(batch: Batch, backend: str) -> Callable[[], Gradients]:
    """Ours: the loss of each utterance, and the gradients of their sum."""
    leaves = _leaves(batch.encoded, batch.predicted, batch.weight, batch.bias)

    def call() -> Gradients:
        # Past the dispatcher, which would hide from `Alive` what is made.
        encoded, predicted, weight, bias = leaves
        loss = op(
            *(encoded, predicted, batch.targets, batch.frames, batch.labels, weight, bias),
            **{"blank_id": 0, "activation": "relu", "fastemit": 0.0},
            **{"durations": None, "sigma": 0.0, "backend": backend},
        )
        return torch.autograd.grad(loss.sum(), leaves)

    return call


def padded(
    batch: Batch, lattice: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
) -> tuple[Callable[[], Gradients], Callable[[Gradients], Gradients]]:
    """The usual way, and how to pack its gradients again.

    Args:
        batch: What to compute.
        lattice: From logits (B, T, U + 1, V), labels (B, U), and lengths to losses (B,).
    """
    frames, states = Padding(batch.frames), Padding(batch.labels.lengthened(1))
    leaves = _leaves(
        frames.pad(batch.encoded), states.pad(batch.predicted), batch.weight, batch.bias
    )
    labels = Padding(batch.labels).pad(batch.targets[:, None])[..., 0]
    lengths = states.lengths - 1

    def call() -> Gradients:
        encoded, predicted, weight, bias = leaves
        hidden = (encoded[:, :, None] + predicted[:, None]).relu()
        logits = F.linear(hidden, weight, bias)
        loss = lattice(logits, labels, frames.lengths, lengths)
        return torch.autograd.grad(loss.sum(), leaves)

    def pack(gradients: Gradients) -> Gradients:
        encoded, predicted, *shared = gradients
        return frames.pack(encoded), states.pack(predicted), *shared

    return call, pack


def dense_lattice(logits: Tensor, labels: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """The loss from log-probabilities that exist whole, an anti-diagonal of the batch at a time."""
    log_probs = logits.float().log_softmax(-1)
    batch, longest, states = log_probs.shape[:3]
    log_blank = log_probs[..., 0]
    columns = labels[:, None, :, None].expand(-1, longest, -1, -1)
    log_label = log_probs[:, :, : states - 1].gather(3, columns)[..., 0]
    state = torch.arange(states, device=logits.device)
    last = frames + lengths - 1
    alpha = torch.where(state == 0, 0.0, _NOTHING).double().expand(batch, -1)
    total = log_blank.new_zeros(batch, dtype=torch.float64)
    for diagonal in range(longest + states - 1):
        frame = diagonal - state
        inside = (frame >= 0) & (frame < longest)
        at = frame.clamp(0, longest - 1)
        stay = torch.where(inside, alpha + log_blank[:, at, state], _NOTHING)
        emit = alpha[:, :-1] + log_label[:, at[:-1], state[:-1]]
        emit = torch.where(inside[:-1], emit, _NOTHING)
        ended = stay.gather(1, lengths[:, None])[:, 0]
        total = torch.where(last == diagonal, ended, total)
        alpha = torch.logaddexp(stay, F.pad(emit, (1, 0), value=_NOTHING))
    return -total.float()


def torchaudio_lattice(logits: Tensor, labels: Tensor, frames: Tensor, lengths: Tensor) -> Tensor:
    """The loss of torchaudio, which takes no bfloat16."""
    from torchaudio.functional import rnnt_loss  # pyright: ignore[reportMissingImports]

    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    numbers = (x.int() for x in (labels, frames, lengths))
    return rnnt_loss(logits.contiguous(), *numbers, blank=0, reduction="none")


class Alive(TorchDispatchMode):
    """The most bytes alive at a time of what is made in the block; for a CPU, which counts none."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.peak = 0
        self._bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and count what it made."""
        given = {x.untyped_storage()._cdata for x in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in _tensors(result):
            storage = x.untyped_storage()
            if storage._cdata not in given:
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._made = {key: x for key, x in self._made.items() if not x[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return result


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return [x for part in tree for x in _tensors(part)] if isinstance(tree, (tuple, list)) else []


def _leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory during a call, beyond what was there before."""
    if device.type != "cuda":
        with Alive() as alive:
            call()
        return alive.peak
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measured(batch: Batch, options: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each way that can compute this batch."""
    gpu = batch.encoded.is_cuda
    ours = "triton" if gpu else "reference"
    ways = {
        ours: (lambda: (packed(batch, ours), lambda gradients: gradients)),
        "peer: padded, torch": lambda: padded(batch, dense_lattice),
        "peer: padded, torchaudio": lambda: padded(batch, torchaudio_lattice),
    }
    rows: list[dict[str, object]] = []
    gold: list[Tensor] = []
    for name, make in ways.items():
        try:
            call, pack = make()
            found = [x.float() for x in pack(call())]
            gold = gold or found
            error = max(_distance(x, y) for x, y in zip(found, gold, strict=True))
            if not error <= _TOLERANCE[batch.encoded.dtype]:
                raise ValueError(f"differs from {ours} by {error:.2g}")
            del found
            peak = peak_bytes(call, batch.encoded.device)
            timing = measure(
                call, batch.encoded.device, repeats=options.repeats, warmup=1, seconds=5.0
            )
        except (ImportError, RuntimeError, ValueError, OSError) as reason:
            text = " ".join(str(reason).split())[:160]
            sys.stderr.write(f"{name}, B={batch.frames.num_sequences}: {text}\n")
            continue
        leaves = batch.encoded, batch.predicted, batch.weight, batch.bias
        row = {
            "op": "transducer_loss",
            "backend": name,
            "batch": batch.frames.num_sequences,
            "frames": batch.frames.max_seqlen,
            "labels": batch.labels.max_seqlen,
            "joint": options.joint,
            "classes": options.classes,
            "dtype": options.dtype,
            "nodes": batch.nodes,
            "padded_nodes": batch.padded_nodes,
            "p50_ms": round(timing.p50, 3),
            "peak_bytes": peak,
            "gradient_bytes": sum(x.nbytes for x in leaves),
            "workspace_bytes": options.workspace if name == "triton" else "",
            "error": f"{error:.2e}",
        }
        rows.append(row)
        sys.stdout.write(
            f"B {row['batch']:5}  {name:26} {timing.p50:10.1f} ms  peak {peak / 2**20:10.1f} MiB, "
            f"gradients {row['gradient_bytes'] / 2**20:.1f}\n"  # type: ignore[operator]
        )
        sys.stdout.flush()
    return rows


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / y.norm())


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--batch", nargs="*", type=int, default=[8, 16, 32, 64], help="B")
    parser.add_argument("--joint", type=int, default=640 if gpu else 64, help="J")
    parser.add_argument("--classes", type=int, default=1024 if gpu else 128, help="V")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--lengths", type=Path, help="durations: JSON lines, .tsv, or numbers")
    parser.add_argument("--seconds", type=float, help="of every utterance, instead")
    parser.add_argument("--frames-per-second", type=float, default=25.0 if gpu else 5.0)
    parser.add_argument(
        "--tokens-per-second", type=float, default=TOKENS_PER_SECOND / (1 + 3 * (not gpu))
    )
    parser.add_argument(
        "--workspace", type=int, default=512 * 2**20, help="bytes; see set_workspace"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="rows are appended to this CSV file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure batch by batch, smallest first."""
    options = parse(arguments)
    set_workspace(options.workspace)
    torch.backends.cuda.matmul.allow_tf32 = False
    where = provenance(torch.device(options.device))
    rows = [
        row | where
        for size in sorted(options.batch)
        for row in measured(draw(size, options), options)
    ]
    if options.output is not None and rows:
        is_new = not options.output.exists()
        options.output.parent.mkdir(parents=True, exist_ok=True)
        with options.output.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
