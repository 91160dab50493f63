"""Cases of the transducer's joint, projection and loss, with peers in torch and of packages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import effasr_kernels as kernels
from benchmarks.contender import Case, Contender, Padding, leaf
from benchmarks.workload import Workload
from effasr_kernels import PackedLayout
from effasr_kernels.runtime import native
from effasr_kernels.shared import lattice
from effasr_kernels.transducer_loss import OPERATION, TransducerArguments

DURATIONS = (0, 1, 2, 3, 4)  # of Parakeet TDT, in frames
_JUDGED = (
    [60, 41, 7],
    [12, 5, 3],
)  # frames and labels on which results of large batches are compared
_SUBSAMPLED = {"8x": 12.5, "4x": 25.0}  # frames a second
_SECONDS, _LABELS = 40.0, 200
_REFERENCE_FRAMES = 1_000
Planes = tuple[Tensor, Tensor, Tensor]


class Nodes:
    """The lattices of a batch, packed: node (t, u) of sequence n is ``first[n] + t (U_n + 1) + u``.

    Peers that bring no lattice use ours, the fastest on this machine, so that times differ only by
    how log-probabilities are computed.
    """

    def __init__(self, frames: PackedLayout, labels: PackedLayout):
        self.frames, self.labels = frames, labels
        self.states = labels.cu_seqlens.diff().long() + 1
        self.first = lattice.node_offsets(frames.cu_seqlens, labels.cu_seqlens)
        pairs = zip(frames.lengths, labels.lengths, strict=True)
        self.counts = [t * (u + 1) for t, u in pairs]
        self.count = sum(self.counts)

    def positions(self, begin: int, end: int) -> Planes:
        """Return sequence, frame and state of a run of nodes, int64."""
        node = torch.arange(begin, end, device=self.first.device)
        sequence = torch.bucketize(node, self.first[1:], right=True)
        offset, states = node - self.first[sequence], self.states[sequence]
        return sequence, offset // states, offset % states

    def losses(self, log_blank: Tensor, log_label: Tensor) -> Tensor:
        return _Losses.apply(log_blank, log_label, self)

    def occupancies(self, log_blank: Tensor, log_label: Tensor) -> Planes:
        planes = log_blank.contiguous(), log_label.contiguous()
        if log_blank.is_cuda:
            return self._on_gpu(*planes)
        if (reason := native.unsupported_reason()) is not None:
            raise RuntimeError(reason)
        offsets = self.frames.cu_seqlens, self.labels.cu_seqlens, self.first[:-1]
        blank, label = map(torch.empty_like, planes)
        return -lattice.transducer(*planes, *offsets, (blank, label)).float(), blank, label

    def _on_gpu(self, log_blank: Tensor, log_label: Tensor) -> Planes:
        from effasr_kernels.transducer_loss.triton.lattice import LabelSweeps
        from effasr_kernels.transducer_loss.triton.plan import Cost, Lattices, Scores, Trace

        plan, size = Lattices(self.frames, self.labels), max(1, self.count)
        (group,) = plan.groups(Cost(1), size, Cost(1), size)
        offsets = self.frames.cu_seqlens, self.labels.cu_seqlens, self.first
        sweeps = LabelSweeps(offsets, self.labels.max_seqlen, fastemit=0.0)
        scores = Scores(0, log_blank, log_label)
        blank, label = torch.empty_like(log_blank), torch.empty_like(log_label)
        loss, trace = log_blank.new_empty(self.frames.num_sequences), Trace(0, blank)
        sweeps.losses(group, scores, trace, loss)
        ones, out = torch.ones_like(loss), Scores(0, blank, label)
        sweeps.occupancies(group, scores, trace, loss, ones, out)
        return loss, blank, label


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_blank: Tensor, log_label: Tensor, nodes: Nodes) -> Tensor:  # type: ignore[override]
        losses, *occupied = nodes.occupancies(log_blank, log_label)
        ctx.nodes = nodes
        ctx.save_for_backward(*occupied)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        counts = ctx.nodes.first.diff()
        scale = (-grad).repeat_interleave(counts, output_size=ctx.nodes.count)
        return *(scale * occupied for occupied in ctx.saved_tensors), None


@dataclass(frozen=True)
class Batch:
    frames: PackedLayout  # T_n
    labels: PackedLayout  # U_n
    encoded: Tensor  # (T, J), a leaf
    predicted: Tensor  # (U + N, J), a leaf
    targets: Tensor  # (U,), int64
    weight: Tensor  # (V, J), a leaf; (V + D, J) with durations
    bias: Tensor  # (V,), a leaf; (V + D,) with durations
    durations: tuple[int, ...] = ()  # the D of a TDT, in frames; none of an RNN-T

    @property
    def leaves(self) -> dict[str, Tensor]:
        names = ("encoded", "predicted", "weight", "bias")
        return {name: getattr(self, name) for name in names}

    @property
    def blank_id(self) -> int:
        """The last class, as most peers require."""
        return self.weight.shape[0] - len(self.durations) - 1

    @property
    def upstream(self) -> Tensor:
        return torch.ones(self.frames.num_sequences, device=self.encoded.device)

    @property
    def padded_logits(self) -> int:
        sequences, classes = self.frames.num_sequences, self.weight.shape[0]
        return sequences * self.frames.max_seqlen * (self.labels.max_seqlen + 1) * classes

    @cached_property
    def nodes(self) -> Nodes:
        return Nodes(self.frames, self.labels)

    def count_flops(self) -> int:
        arguments = TransducerArguments(
            *(self.encoded, self.predicted, self.targets, self.frames, self.labels),
            *(self.weight, self.bias),
            **{"blank_id": self.blank_id, "activation": "relu", "fastemit": 0.0, "sigma": 0.0},
            **{"durations": self.durations or None, "overwritten": ()},
        )
        return flop_registry[torch.ops.effasr.transducer_loss](*OPERATION.flatten(arguments))


Peer = Callable[[Batch], Contender]


def draw(
    workload: Workload,
    frames: Sequence[int],
    labels: Sequence[int],
    joint: int,
    classes: int,
    durations: tuple[int, ...] = (),
) -> Batch:
    """Return a batch of these lengths, equal in every run; the rest as the workload has it."""
    device, total, rows = workload.device, sum(labels), classes + len(durations)
    generator = torch.Generator(device).manual_seed(4)
    scale = joint**-0.5
    return Batch(
        PackedLayout.from_lengths(frames, device),
        PackedLayout.from_lengths(labels, device),
        workload.draw(sum(frames), joint),
        workload.draw(total + len(labels), joint),
        torch.randint(classes - 1, (total,), device=device, generator=generator),
        workload.draw(rows, joint, scale=scale),
        workload.draw(rows, scale=scale),
        durations,
    )


# --- cases ----------------------------------------------------------------------------------------


def cases(workload: Workload) -> list[Case]:
    """RNN-T and TDT of utterances as long as the others'; the joint has the model's width."""
    frames, labels = workload.lengths
    joint, classes = workload.width, workload.widths.pieces
    shape = f"{workload.describe()} J={joint} V={classes}"
    made = []
    for kind, durations, peers in (("", (), PEERS), ("tdt", DURATIONS, TDT_PEERS)):
        make = partial(draw, workload, joint=joint, classes=classes, durations=durations)
        small = None if sum(frames) <= _REFERENCE_FRAMES else partial(make, *_JUDGED)
        made.append(_case(kind, shape, partial(make, frames, labels), small, peers))
    return made


def large(workload: Workload) -> Iterator[Case]:
    """Yield the batch of the published mark, 1,024 utterances of 40 s; tiny on a CPU."""
    gpu = workload.device.type == "cuda"
    size, joint, labels = (1024, 640, _LABELS) if gpu else (4, 8, 5)
    for classes in (1024, 4096) if gpu else (16, 32):
        for name, rate in _SUBSAMPLED.items():
            frames = round(_SECONDS * rate) if gpu else round(rate)
            shape = f"B={size} T={frames} U={labels} J={joint} V={classes}"
            make = partial(draw, workload, joint=joint, classes=classes)
            batch = partial(make, [frames] * size, [labels] * size)
            yield _case(f"large {name}", shape, batch, partial(make, *_JUDGED), PEERS)


def _case(
    kind: str,
    shape: str,
    make: Callable[[], Batch],
    small: Callable[[], Batch] | None,
    peers: Mapping[str, Peer],
) -> Case:
    """Return a case whose batch is drawn when somebody computes it."""
    batch = cache(make)

    def ours(backend: str) -> Contender:
        drawn = batch()
        arguments: dict[str, Any] = {**drawn.leaves, "targets": drawn.targets}
        arguments |= {"layout_frames": drawn.frames, "layout_targets": drawn.labels}
        arguments |= {"blank_id": drawn.blank_id, "durations": drawn.durations or None}
        run = lambda: kernels.transducer_loss(**arguments, backend=backend)
        return Contender(drawn.leaves, run, [drawn.upstream])

    return Case(
        op="transducer_loss",
        kind=kind,
        shape=shape,
        ours=ours,
        peers={name: lambda peer=peer: peer(batch()) for name, peer in peers.items()},
        small=None if small is None else _case(kind, "small", small, None, peers),
        flops=lambda: batch().count_flops(),
        heavy=kind.startswith("large"),
    )


# --- peers on padded batches ----------------------------------------------------------------------


class Padded:
    """A batch padded to its longest utterance: f (B, T, J), g (B, U + 1, J), targets (B, U)."""

    def __init__(self, batch: Batch, dtype: torch.dtype | None = None):
        self.batch = batch
        paddings = {"encoded": batch.frames, "predicted": batch.labels.lengthened(1)}
        self._paddings = {name: Padding(layout) for name, layout in paddings.items()}
        self.leaves: dict[str, Tensor] = {}
        for name, x in batch.leaves.items():
            padding = self._paddings.get(name)
            copy = x.detach().clone() if padding is None else padding.pad(x)
            self.leaves[name] = copy.to(dtype or x.dtype).requires_grad_()
        self.targets = batch.targets.new_zeros(batch.labels.num_sequences, batch.labels.max_seqlen)
        column = torch.arange(self.targets.shape[1], device=self.targets.device)
        self.targets[column < batch.nodes.states[:, None] - 1] = batch.targets
        # Of frames and of labels, int32.
        self.lengths = (
            self._paddings["encoded"].lengths.int(),
            (self._paddings["predicted"].lengths - 1).int(),
        )

    def packed(self, name: str, x: Tensor) -> Tensor:
        padding = self._paddings.get(name)
        return x if padding is None else padding.pack(x)


Loss = Callable[[Tensor, Padded], Tensor]
"""Computes losses (B,) from logits (B, T, U + 1, V)."""


def padded(batch: Batch, loss: Loss, *, dtype: torch.dtype | None = None) -> Contender:
    """Joint and projection of padded tensors, then a loss."""
    whole = Padded(batch, dtype)

    def call() -> Tensor:
        encoded, predicted, weight, bias = whole.leaves.values()
        hidden = (encoded[:, :, None] + predicted[:, None]).relu_()
        return loss(F.linear(hidden, weight, bias), whole).float()

    return Contender(whole.leaves, call, [batch.upstream], whole.packed)


def plain(logits: Tensor, whole: Padded) -> Tensor:
    """Compute losses with autograd: log-probabilities of all classes, then blank and label."""
    batch, shape = whole.batch, logits.shape
    log_probs = logits.log_softmax(-1, dtype=torch.float32)
    # The label of each node, 0 for none.
    classes = F.pad(whole.targets, (0, 1))[:, None, :, None].expand(*shape[:3], 1)
    sequence, frame, state = batch.nodes.positions(0, batch.nodes.count)
    index = (sequence * shape[1] + frame) * shape[2] + state
    both = log_probs[..., batch.blank_id], log_probs.gather(3, classes)
    return batch.nodes.losses(*(x.flatten().index_select(0, index) for x in both))


def chunked(batch: Batch, rows: int) -> Contender:
    """Return NVIDIA's FlashRNNT as described: packed rows in tiles, recomputed in the backward.

    Only one tile's joint output and logits exist at a time. Log-probabilities of blank and label
    are kept, and the gradient overwrites the logits. As in FlashRNNT, each tile adds float32
    gradients of the whole batch's inputs. Its Triton kernels are compiled torch code here.
    """
    leaves = {name: leaf(x) for name, x in batch.leaves.items()}
    nodes = batch.nodes
    starts = [layout.cu_seqlens.long() for layout in (batch.frames, batch.labels)]
    targets = F.pad(batch.targets, (0, 1))

    def tile(*arguments: Any) -> tuple[Tensor, Tensor]:
        encoded, predicted, weight, bias, begin, end = arguments
        sequence, frame, state = nodes.positions(begin, end)
        label = starts[1][sequence] + state
        hidden = _Join.apply(encoded, predicted, starts[0][sequence] + frame, label + sequence)
        # In the last state there is no label; which is scored then does not matter.
        return _Score.apply(F.linear(hidden, weight, bias), targets[label], batch.blank_id)

    def call() -> Tensor:
        options = {"use_reentrant": False, "preserve_rng_state": False}
        planes = [
            checkpoint(tile, *leaves.values(), begin, min(begin + rows, nodes.count), **options)
            for begin in range(0, nodes.count, rows)
        ]
        return nodes.losses(*(torch.cat(tiles) for tiles in zip(*planes, strict=True)))

    return Contender(leaves, call, [batch.upstream])


class _Join(torch.autograd.Function):
    """The rows of the joint's output."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, encoded: Tensor, predicted: Tensor, frame: Tensor, state: Tensor
    ) -> Tensor:
        hidden = encoded.index_select(0, frame).add_(predicted.index_select(0, state)).relu_()
        ctx.save_for_backward(hidden, frame, state)
        ctx.rows = encoded.shape[0], predicted.shape[0]
        return hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, *indices = ctx.saved_tensors
        wide = grad.float().mul_(hidden > 0)
        sums = (
            wide.new_zeros(rows, wide.shape[1]).index_add_(0, index, wide).to(grad.dtype)
            for rows, index in zip(ctx.rows, indices, strict=True)
        )
        return *sums, None, None


class _Score(torch.autograd.Function):
    """Log-probabilities of blank and label, float32; the logits' gradient takes their place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, label: Tensor, blank_id: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        normalizer = _compiled(_normalizer, logits.is_cuda)(logits.detach())
        ctx.save_for_backward(logits, label, normalizer)
        ctx.blank_id = blank_id
        of_label = logits.gather(1, label[:, None])[:, 0]
        return logits[:, blank_id].float() - normalizer, of_label.float() - normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, label, normalizer = ctx.saved_tensors
        gradient = logits.detach()
        write = _compiled(_write_gradient, logits.is_cuda)
        write(gradient, label, normalizer, *grads, ctx.blank_id)
        return gradient, None, None


def _normalizer(logits: Tensor) -> Tensor:
    return logits.float().logsumexp(-1)


def _write_gradient(
    logits: Tensor, label: Tensor, normalizer: Tensor, blanks: Tensor, labels: Tensor, blank_id: int
) -> None:
    column = torch.arange(logits.shape[1], device=logits.device)
    gradient = (logits.float() - normalizer[:, None]).exp() * -(blanks + labels)[:, None]
    gradient += torch.where(column == blank_id, blanks[:, None], 0.0)
    gradient += torch.where(column == label[:, None], labels[:, None], 0.0)
    logits.copy_(gradient)


@cache
def _compiled(function: Callable[..., Any], on_gpu: bool) -> Callable[..., Any]:
    """Fused where that pays; the last tile has fewer rows."""
    return torch.compile(function, dynamic=True) if on_gpu else function


# --- peers of packages, each used where it is installed -------------------------------------------


def _torchaudio(batch: Batch, dtype: torch.dtype) -> Contender:
    from torchaudio.functional import rnnt_loss  # pyright: ignore[reportMissingImports]

    if batch.padded_logits >= 2**31:
        raise ValueError(f"{batch.padded_logits} logits, but its offsets have 32 bits")

    def loss(logits: Tensor, whole: Padded) -> Tensor:
        inputs = logits, whole.targets.int(), *whole.lengths
        return rnnt_loss(*inputs, blank=batch.blank_id, reduction="none")

    return padded(batch, loss, dtype=dtype)


def _transformers_tdt(batch: Batch) -> Contender:
    """Hugging Face's TDT loss: in torch, one diagonal of the lattice after the other."""
    from transformers.loss.loss_tdt import tdt_loss

    def loss(logits: Tensor, whole: Padded) -> Tensor:
        frames, labels = (lengths.long() for lengths in whole.lengths)
        return tdt_loss(
            *logits.split([batch.blank_id + 1, len(batch.durations)], -1),
            targets=whole.targets,
            logit_lengths=frames,
            target_lengths=labels,
            blank_token_id=batch.blank_id,
            durations=list(batch.durations),
            reduction="none",
        )

    return padded(batch, loss)


# In order: those that fit into memory before those that may not.
PEERS: dict[str, Peer] = {
    "FlashRNNT's way, in torch": lambda batch: chunked(
        batch, 200_000 if batch.encoded.is_cuda else 50
    ),
    "torchaudio float16": lambda batch: _torchaudio(batch, torch.float16),
    "torchaudio float32": lambda batch: _torchaudio(batch, torch.float32),
    "torch dense": lambda batch: padded(batch, plain),
}
TDT_PEERS: dict[str, Peer] = {"transformers dense": _transformers_tdt}
