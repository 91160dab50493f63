"""The transducer's joint network, projection and loss, in memory that is flat in the batch size."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import CHANNELS, CLASSES, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.flops import pairs
from effasr_kernels.runtime.inplace_grad import check_overwritable
from effasr_kernels.runtime.torch_op import DifferentiableOp
from effasr_kernels.shared.ragged import wide_dtype


@dataclass(frozen=True, slots=True)
class TransducerArguments:
    encoded: Tensor
    predicted: Tensor
    targets: Tensor
    layout_frames: PackedLayout
    layout_targets: PackedLayout
    weight: Tensor
    bias: Tensor
    blank_id: int
    activation: str
    fastemit: float
    durations: tuple[int, ...] | None = None
    sigma: float = 0.0
    overwritten: tuple[str, ...] = ()
    max_nodes: int | None = None


def _example(inputs: ExampleInputs, rows: int = CLASSES, **options: Any) -> Keywords:
    frames, tokens = inputs.frames(), inputs.tokens()
    return {
        "encoded": inputs.floating(frames.rows, CHANNELS),
        "predicted": inputs.floating(tokens.rows + tokens.num_sequences, CHANNELS),
        "targets": inputs.targets(),
        "layout_frames": frames,
        "layout_targets": tokens,
        "weight": inputs.floating(rows, CHANNELS),
        "bias": inputs.floating(rows),
        "blank_id": 0,
        **options,
    }


_NODES = 24 * 6 + 16 * 4

OPERATION = DifferentiableOp(
    "transducer_loss",
    TransducerArguments,
    {
        Backend.TRITON: "effasr_kernels.transducer_loss.triton.backend",
        Backend.CPP: "effasr_kernels.transducer_loss._cpp",
        Backend.REFERENCE: "effasr_kernels.transducer_loss.reference",
    },
    outputs=lambda a: a.encoded.new_empty(
        a.layout_frames.num_sequences, dtype=wide_dtype(a.encoded)
    ),
    flops=lambda a: 2 * pairs(a.layout_frames, a.layout_targets.lengthened(1)) * a.weight.numel(),
    overwritable=("encoded", "predicted"),
    examples=[
        Example("transducer_loss", _example, 2 * _NODES * CLASSES * CHANNELS),
        Example(
            "transducer_loss, durations",
            lambda inputs: _example(inputs, CLASSES + 2, durations=(0, 1), sigma=0.05),
            2 * _NODES * (CLASSES + 2) * CHANNELS,
        ),
    ],
)

_NAME = OPERATION.name


def transducer_loss(
    encoded: Tensor,
    predicted: Tensor,
    targets: Tensor,
    layout_frames: PackedLayout,
    layout_targets: PackedLayout,
    weight: Tensor,
    bias: Tensor,
    *,
    blank_id: int,
    activation: Literal["relu", "tanh"] = "relu",
    fastemit: float = 0.0,
    durations: tuple[int, ...] | None = None,
    sigma: float = 0.0,
    overwrite_inputs: bool = False,
    max_nodes: int | None = None,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Negative log-likelihood of each transcript under a transducer (RNN-T or TDT), exact.

    .. math::
        \ell_n = -\log \sum_{\pi} \prod_{(t, u) \in \pi} P_{tu}(\pi_{tu}), \qquad
        P_{tu} = \mathrm{softmax}(W \, \mathrm{act}(f_t + g_u) + b)

    over all paths that start at frame 0 with no label, take one blank per frame and emit the labels
    y_1 to y_U in between; the last step is the blank of the last frame. The (T_n, U_n + 1, V)
    tensors of all sequences never exist at the same time, so memory does not grow with N
    (`set_workspace`). There is no double backward. The activation's output is rounded to the dtype
    of the arguments, like the output of a layer; sums are float32 (float64 for float64), and those
    of the lattice float64. Under autocast the floating arguments are cast as for a matrix product.

    The loss of a sequence without frames is 0 without labels, else +inf. A loss of +inf (also from
    logits of -inf) has zero gradient.

    FastEmit multiplies the gradient of every label by 1 + lambda, so that labels are emitted
    earlier. The value of the loss is unchanged, so the gradient is not that of the value.

    With ``durations`` this is the token-and-duration transducer (TDT): the last D rows of weight
    and bias score the duration of a symbol in frames, with a separate softmax Q, and

    .. math::
        \ell_n = -\log \sum_{\pi} \prod_{(t, u, d) \in \pi}
            e^{-\sigma} P_{tu}(\pi_{tu}) \, Q_{tu}(d)

    over all paths in which each step advances by its d frames: a blank by at least 1, a label to an
    existing frame, and the last step, a blank, from any frame to exactly T_n. If no path exists,
    for example for two frames with steps of three, the loss is +inf. Sigma under-normalizes P, so
    that long durations, which need fewer symbols, are preferred; the loss equals that of NeMo and
    of transformers' ``ParakeetForTDT``. FastEmit does not change the gradient of durations, as in
    NeMo. For NeMo's omega, the fraction of batches that train RNN-T, call without durations, with
    the first V rows of weight and bias.

    Args:
        encoded: f, (T, J), floating point.
        predicted: g, (U + N, J), the dtype of ``encoded``: each sequence has one more row than
            labels; the first precedes all labels (``layout_targets.lengthened(1)``).
        targets: y, (U,), int32 or int64, each in [0, V) and not the blank; the tail is not read.
        layout_frames: Layout of ``encoded``.
        layout_targets: Layout of ``targets``, with the same number of sequences.
        weight: W, (V, J), the dtype of ``encoded``, with V including the blank; (V + D, J) with
            durations.
        bias: b, (V,), the dtype of ``encoded``; (V + D,) with durations.
        blank_id: The blank's class, in [0, V).
        activation: ``"relu"`` or ``"tanh"``.
        fastemit: Lambda of FastEmit, at least 0.
        durations: D numbers of frames, increasing and at least 0, such as (0, 1, 2, 3, 4); None for
            an RNN-T.
        sigma: Under-normalization of a TDT, at least 0; 0 without durations.
        overwrite_inputs: Whether the backward writes the gradients of ``encoded`` and
            ``predicted``, if they require one, over these tensors, which saves memory. Each must be
            the contiguous result of an operation and share no memory. Their values are lost: there
            is no second backward, and autograd raises an error if another operation still needs
            them, as after any in-place operation. Not supported in compiled code.
        max_nodes: Capacity for the nodes of all lattices, at least the sum of T_n (U_n + 1) over
            the sequences, for batches of a static shape. Kernels then divide the nodes on the
            device, and the host reads no length, so that a CUDA graph can contain the call. Memory
            has 16 bytes for each node of the capacity, 36 + 8 D with durations, beside the
            workspace, and products have rows for all of the capacity. None to divide the nodes on
            the host, by the lengths.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        The loss of each sequence, (N,), float32 (float64 for float64).

    Raises:
        ValueError: An argument is invalid. The values of ``targets`` are checked only on a CPU, as
            the check would wait for a GPU.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Graves, 2012, https://arxiv.org/abs/1211.3711; Li et al., 2019,
        https://arxiv.org/abs/1909.12415 (gradient merged into the forward); Braun et al., 2022,
        https://arxiv.org/abs/2211.16270 (sample by sample); Yu et al., 2020,
        https://arxiv.org/abs/2010.11148 (FastEmit); Xu et al., 2023,
        https://arxiv.org/abs/2304.06795 (TDT).
    """
    encoded, predicted, weight, bias = checks.under_autocast(encoded, predicted, weight, bias)
    checks.check_shape(_NAME, "encoded", encoded, "(T, J)", None, None)
    checks.check_rows(_NAME, "encoded", encoded, "layout_frames", layout_frames)
    joint = encoded.shape[1]
    rows = layout_targets.rows + layout_targets.cu_seqlens.shape[0] - 1
    checks.check_shape(_NAME, "predicted", predicted, "(U + N, J)", rows, joint)
    classes = "V" if durations is None else "V + D"
    checks.check_shape(_NAME, "weight", weight, f"({classes}, J)", None, joint)
    checks.check_shape(_NAME, "bias", bias, f"({classes},)", weight.shape[0])
    checks.check_floating(_NAME, encoded=encoded, predicted=predicted, weight=weight, bias=bias)
    count = weight.shape[0] - _count_durations(durations, sigma)
    if count < 1:
        rule = f"have more rows than {len(durations or ())} durations"
        raise checks.wrong(_NAME, "weight", rule, tuple(weight.shape))
    checks.check_transcripts(_NAME, targets, layout_targets, layout_frames, count, blank_id)
    if activation not in ("relu", "tanh"):
        raise checks.wrong(_NAME, "activation", 'be "relu" or "tanh"', repr(activation))
    if not fastemit >= 0:
        raise checks.wrong(_NAME, "fastemit", "be at least 0", fastemit)
    if max_nodes is not None:
        _check_capacity(layout_frames, layout_targets, max_nodes)
    overwritten: tuple[str, ...] = ()
    if overwrite_inputs:
        overwritten = _overwritten(
            encoded=encoded, predicted=predicted, weight=weight, bias=bias, targets=targets
        )
    arguments = TransducerArguments(
        *(encoded, predicted, targets, layout_frames, layout_targets, weight, bias),
        *(blank_id, activation, fastemit, durations, sigma, overwritten, max_nodes),
    )
    return OPERATION(arguments, backend)


def _check_capacity(frames: PackedLayout, targets: PackedLayout, max_nodes: int) -> None:
    """Check ``max_nodes``, against the lengths if the host knows them."""
    if not 0 <= max_nodes < 2**31:
        raise checks.wrong(_NAME, "max_nodes", "lie in 0 to 2**31 - 1", max_nodes)
    if targets.static_max_seqlen is None and not targets.known_on_host:
        rule = "be None without a bound of the transcripts' lengths (`static_max_seqlen`)"
        raise checks.wrong(_NAME, "max_nodes", rule, max_nodes)
    if frames.known_on_host and targets.known_on_host:
        nodes = sum(t * (u + 1) for t, u in zip(frames.lengths, targets.lengths, strict=True))
        if nodes > max_nodes:
            raise checks.wrong(_NAME, "max_nodes", f"be at least the {nodes} nodes", max_nodes)


def _overwritten(**tensors: Tensor) -> tuple[str, ...]:
    """Names of the tensors over which gradients are written, for ``overwrite_inputs``."""
    if torch.compiler.is_compiling():
        remedy = "in compiled code, which decides on memory itself"
        raise checks.wrong(_NAME, "overwrite_inputs", f"be False {remedy}", True)
    if not torch.is_grad_enabled():
        return ()
    names = tuple(name for name in ("encoded", "predicted") if tensors[name].requires_grad)
    check_overwritable(_NAME, "overwrite_inputs", names, **tensors)
    return names


def _count_durations(durations: tuple[int, ...] | None, sigma: float) -> int:
    if not sigma >= 0:
        raise checks.wrong(_NAME, "sigma", "be at least 0", sigma)
    if durations is None:
        if sigma:
            raise checks.wrong(_NAME, "sigma", "be 0 without `durations`", sigma)
        return 0
    increasing = all(a < b for a, b in itertools.pairwise(durations))
    if not durations or not increasing or durations[0] < 0 or durations[-1] < 1:
        rule = "increase, from 0 or more to 1 or more, as (0, 1, 2, 3, 4) do"
        raise checks.wrong(_NAME, "durations", rule, durations)
    return len(durations)


class _Workspace:
    """The memory limit, beside the arguments and their gradients."""

    bytes = 512 * 2**20


def set_workspace(size: int) -> int:
    """Set the size of the workspace; the default is 512 MiB.

    The Triton backend uses a quarter for numbers of lattice nodes, and three quarters for rows of
    the joint's output and of the logits' gradient. A larger workspace makes products larger and
    launches fewer; results change only by rounding. The minimum is one frame of one sequence and
    the lattice of one sequence, however small the workspace; see
    `effasr_kernels.transducer_loss.triton.backend`. The backend ``cpp`` uses at most 32 MiB for
    each thread of it.

    The setting applies to the whole process (autograd runs backward passes in its own threads), so
    programs should set it, not libraries. Compiled code keeps the value from its compilation.

    Args:
        size: Size in bytes, positive.

    Returns:
        The setting before this call, to restore it.

    Raises:
        ValueError: ``size`` is not positive.
    """
    if size <= 0:
        raise ValueError(f"`size` must be positive, but is {size}.")
    previous = _Workspace.bytes
    _Workspace.bytes = size
    return previous


def workspace() -> int:
    return _Workspace.bytes
