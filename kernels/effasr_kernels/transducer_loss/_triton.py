r"""`transducer_loss` in Triton, in memory that is flat in the batch size.

Forward, group by group of sequences, chunk by chunk of their lattices' nodes (`_plan`): the rows of
the joint's output and their logits of blank and label; their normalizers, from one pass over the
vocabulary that stores no logits; the log-probabilities of durations, if there are any; then the
lattices of the group (`_sweeps`). Backward, the same way: how much of the upstream gradient passes
each step; the gradient of the chunk's logits, which are made again; its products with weight and
rows; and its sums over states and over frames. Gradients are computed in the backward, so they are
exact for any upstream gradient, nobody waits for the GPU, and they may replace the inputs: a frame
is read last in the chunk that finishes its gradient, and a state in the group that does. The
joint's output is summed in float32 and rounded to the dtype of the arguments, as is the gradient of
the logits; products, normalizers and sums are float32.

With J columns, C rows of the weight (V classes and D durations) and R nodes, products are 8 R J C
operations, of which 2 R J C are logits made again. Normalizers and shares of nodes are kept for the
backward, 8 bytes for each node of the static shape (frame rows times states of the longest
transcript), or 20 + 4 D with durations, whose way back needs log-probabilities and masses; if that
fits in a quarter of the workspace (`workspace.set_workspace`). If not, the backward makes them
again, group by group: 10 R J C operations; or 8 R J C, if the rounded logits of eight of the
longest sequences fit in three quarters of the workspace, where they are then kept from the one
product to the next.

Peak memory, beside the arguments and their gradients (none of ``encoded`` and ``predicted`` where
these are overwritten): the workspace, and what is kept, at most a quarter of it; 4 J C for the
gradient of weight in float32; and for a sequence, or a frame, that is larger than its part of the
workspace, what that alone needs: 12 bytes for each node (16 where nothing was kept; with durations
16 + 4 D and 20 + 4 D), and 4 J + b (J + C) for each state of a frame, with b the bytes of an
element. Nothing grows with the number of sequences but their offsets.

The host divides the nodes, from lengths that it knows. In compiled code, and for a layout whose
offsets only the device knows, it waits for them, so a CUDA graph cannot hold this operation.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.launch import refusal
from effasr_kernels.transducer_loss import _passes
from effasr_kernels.transducer_loss._duration_lattice import LONGEST, DurationSweeps
from effasr_kernels.transducer_loss._sweeps import LabelSweeps, Sweeps
from effasr_kernels.transducer_loss.torch_op import call


def why_not(
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    weight: Tensor,
    bias: Tensor,
    *,
    blank_id: int,
    activation: str,
    fastemit: float,
    durations: tuple[int, ...] | None = None,
    sigma: float = 0.0,
    overwritten: tuple[str, ...] = (),
) -> str | None:
    """Any shape is served; durations are as far as registers go."""
    if durations is not None and durations[-1] > LONGEST:
        return f"durations of more than {LONGEST} frames are the reference's alone"
    return refusal(encoded, predicted, weight, bias)


def _sweeps(durations: tuple[int, ...] | None) -> type[Sweeps]:
    return LabelSweeps if durations is None else DurationSweeps


forward = partial(_passes.forward, _sweeps)
saved_like = partial(_passes.saved_like, _sweeps)
backward = partial(_passes.backward, _sweeps)
run = call.kernel(__name__, forward, backward)
