"""Checks of arguments, with messages of the form ``op: `arg` must RULE, but is VALUE``.

Messages are formatted only on failure, as calls are frequent and torch.compile traces them.
"""

from typing import Any

import torch
from torch import Tensor

from effasr_kernels.packed import PackedLayout

_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGER = (torch.int32, torch.int64)


def wrong(op: str, name: str, rule: str, value: Any) -> ValueError:
    return ValueError(f"{op}: `{name}` must {rule}, but is {value}.")


def check_shape(op: str, name: str, tensor: Tensor, letters: str, *sizes: int | None) -> None:
    """Check the shape; a required size of None accepts any."""
    shape = tensor.shape
    if len(shape) == len(sizes):
        for i, size in enumerate(sizes):
            if size is not None and size != shape[i]:
                break
        else:
            return
    expected = ", ".join("any" if size is None else str(size) for size in sizes)
    expected += "," if len(sizes) == 1 else ""
    raise wrong(op, name, f"have shape {letters} = ({expected})", tuple(shape))


def check_rows(op: str, name: str, tensor: Tensor, layout_name: str, layout: PackedLayout) -> None:
    if tensor.shape[0] != layout.rows:
        rule = f"have {layout.rows} rows, as `{layout_name}` does"
        raise wrong(op, name, rule, tuple(tensor.shape))
    if tensor.device != layout.cu_seqlens.device:
        raise wrong(op, layout_name, f"be on {tensor.device}, as `{name}` is", layout.device)


def check_same_sequences(
    op: str, name: str, layout: PackedLayout, like_name: str, like: PackedLayout
) -> None:
    if layout is like:
        return
    actual, expected = layout.cu_seqlens.shape[0] - 1, like.cu_seqlens.shape[0] - 1
    if actual != expected:
        raise wrong(op, name, f"have {expected} sequences, as `{like_name}` does", actual)


def check_floating(op: str, **tensors: Tensor | None) -> None:
    """Check that tensors are floating point, of one dtype and on one device; None is skipped."""
    first_name, first = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first_name, first = name, tensor
            if tensor.dtype not in _FLOATING:
                rule = "be float16, bfloat16, float32 or float64"
                raise wrong(op, name, rule, tensor.dtype)
        elif tensor.dtype != first.dtype:
            raise wrong(op, name, f"be {first.dtype}, as `{first_name}` is", tensor.dtype)
        elif tensor.device != first.device:
            raise wrong(op, name, f"be on {first.device}, as `{first_name}` is", tensor.device)


def check_beside(op: str, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Check a floating tensor whose dtype may differ from that of another one, unless wide."""
    if tensor.dtype not in _FLOATING:
        raise wrong(op, name, "be float16, bfloat16, float32 or float64", tensor.dtype)
    if (tensor.dtype == torch.float64) != (like.dtype == torch.float64):
        rule = f"be float64 exactly if `{like_name}` is, which is {like.dtype}"
        raise wrong(op, name, rule, tensor.dtype)
    if tensor.device != like.device:
        raise wrong(op, name, f"be on {like.device}, as `{like_name}` is", tensor.device)


def check_integers(op: str, name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Check that class numbers are int32 or int64 and on the device of ``like``."""
    if tensor.dtype not in _INTEGER:
        raise wrong(op, name, "be int32 or int64", tensor.dtype)
    if tensor.device != like.device:
        raise wrong(op, name, f"be on {like.device}, as `{like_name}` is", tensor.device)


def check_attention(
    op: str,
    q: Tensor,  # queries
    k: Tensor,  # keys
    v: Tensor,  # values
    layout_q: PackedLayout,
    layout_k: PackedLayout,  # layout of `k` and `v`
    dropout: float,  # probability to drop a weight
    *,
    grouped: bool = False,  # whether several heads of ``q`` may share one of `k` and `v`
) -> None:
    """Check the arguments that all attention operations share, except for their dtypes."""
    check_shape(op, "q", q, "(T_q, H, D)", None, None, None)
    check_rows(op, "q", q, "layout_q", layout_q)
    heads, width = q.shape[1:]
    if grouped:
        check_shape(op, "k", k, "(T_k, H_k, D)", None, None, width)
        if not k.shape[1] or heads % k.shape[1]:
            rule = f"have a number of heads that divides {heads}, that of `q`"
            raise wrong(op, "k", rule, tuple(k.shape))
        heads = k.shape[1]
    for name, tensor in (("k", k), ("v", v)):
        check_shape(op, name, tensor, "(T_k, H, D)", None, heads, width)
        check_rows(op, name, tensor, "layout_k", layout_k)
    check_same_sequences(op, "layout_k", layout_k, "layout_q", layout_q)
    if not 0 <= dropout < 1:
        raise wrong(op, "dropout", "be in [0, 1)", dropout)


def check_transcripts(
    op: str,
    targets: Tensor,
    layout: PackedLayout,
    layout_frames: PackedLayout,
    classes: int,
    blank_id: int,
) -> None:
    """Check the labels that a lattice aligns to frames, except for their values."""
    check_shape(op, "targets", targets, "(U,)", layout.rows)
    check_rows(op, "targets", targets, "layout_targets", layout)
    check_integers(op, "targets", targets, "layout_frames", layout_frames.cu_seqlens)
    check_same_sequences(op, "layout_targets", layout, "layout_frames", layout_frames)
    if not 0 <= blank_id < classes:
        raise wrong(op, "blank_id", f"be in [0, {classes})", blank_id)


def check_labels(
    op: str, labels: Tensor, classes: int, exception: str, forbidden: int | None = None
) -> None:
    """Check the values of ``targets`` on a CPU; on a GPU the check would wait for the device."""
    if not labels.is_cpu:
        return
    bad = (labels < 0) | (labels >= classes)
    if forbidden is not None:
        bad |= labels == forbidden
    if bool(bad.any()):
        raise wrong(
            op, "targets", f"hold classes in [0, {classes}){exception}", labels[bad][0].item()
        )


def under_autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Cast floating tensors as autocast does for a matrix product, if autocast is enabled."""
    # Under autocast the inputs of one call arrive in several dtypes (parameters in float32,
    # activations in bfloat16). As in torch's own matrix products, float64 is not cast. The first
    # tensor is not None.
    kind = tensors[0].device.type  # type: ignore[union-attr]
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        tensor.to(dtype)
        if tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64
        else tensor
        for tensor in tensors
    )
