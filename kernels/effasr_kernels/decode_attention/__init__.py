"""Attention of one new token of each hypothesis to keys and values in pages."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import HEADS, WIDTH, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import ForwardOnlyOp
from effasr_kernels.shared import paged


@dataclass(frozen=True, slots=True)
class DecodeArguments:
    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    lengths: Tensor
    new_k: Tensor | None
    new_v: Tensor | None
    scale: float
    splits: int | None


def _flops(a: DecodeArguments) -> int:
    sequences, pages = a.page_table.shape
    if is_fake(a.lengths):
        # Lengths are not known; the pages are full at most.
        keys = sequences * pages * a.k_pages.shape[1]
    else:
        keys = int(a.lengths.clamp(min=0).sum())
    return 4 * keys * a.q.numel() // max(1, sequences)


def _example(inputs: ExampleInputs, hypotheses: int = 1, share: int = 1) -> Keywords:
    return {
        "q": inputs.floating(3 * hypotheses, share * HEADS, WIDTH),
        "k_pages": inputs.floating(6, 16, HEADS, WIDTH),
        "v_pages": inputs.floating(6, 16, HEADS, WIDTH),
        "page_table": inputs.integers([5, 1], [0, 0], [2, 4]),
        "lengths": inputs.integers(24, 0, 16),
        "splits": 2,
    }


def _self_attention(inputs: ExampleInputs, share: int = 1) -> Keywords:
    keywords = _example(inputs, share=share)
    new = {name: inputs.floating(3, HEADS, WIDTH) for name in ("new_k", "new_v")}
    return {**keywords, **new}


OPERATION = ForwardOnlyOp(
    "decode_attention",
    DecodeArguments,
    outputs=lambda a: a.q.new_empty(a.q.shape),
    flops=_flops,
    written=("k_pages", "v_pages"),
    written_with="new_k",
    examples=[
        Example("decode_attention, self", _self_attention, 4 * HEADS * WIDTH * 40),
        Example(
            "decode_attention, grouped queries",
            lambda inputs: _self_attention(inputs, share=2),
            4 * 2 * HEADS * WIDTH * 40,
        ),
        Example(
            "decode_attention, cross",
            lambda inputs: _example(inputs, hypotheses=4),
            4 * HEADS * WIDTH * 4 * 40,
        ),
    ],
)

_NAME = OPERATION.name


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    new_k: Tensor | None = None,
    new_v: Tensor | None = None,
    scale: float | None = None,
    splits: int | None = None,
    backend: Backend | str | None = None,
) -> Tensor:
    r"""Let query n attend to the first ``lengths[s]`` keys of its sequence ``s = n // (N // S)``.

    .. math:: o_n = \sum_{j < L_s} \mathrm{softmax}_j(\mathrm{scale} \cdot q_n \cdot k_{sj}) v_{sj}

    for each head, where key j is row ``j % B`` of page ``page_table[s, j // B]``. In
    cross-attention of a beam, the hypotheses of a sequence are adjacent queries and share its keys.
    In self-attention each hypothesis is a sequence, S = N, with a new key and value: ``new_k`` and
    ``new_v`` are first written, in place, to key ``lengths[n] - 1``, in the same launch. The output
    of a sequence of length 0 is zero, and nothing is written for it. Pages past the length and
    their entries of the table are never read. There is no gradient. Scores and sums are float32
    (float64 for float64).

    In grouped-query attention, Hk divides H, and head h of a query attends to head
    ``h // (H // Hk)`` of the keys and values, whose tiles a kernel loads once for all queries and
    heads that share them, up to 16 (float32 of more than 128 channels: once for each).

    Shapes are static and the host does not wait for the device, so a call can be captured in a CUDA
    graph and replayed with other lengths and tables. A row depends only on its own sequence,
    bitwise: on a GPU for given B, D, ``H // Hk``, ``N // S``, M and ``splits``; with the reference
    for given H, Hk, D, ``N // S`` and number of threads. The default number of splits depends on M,
    B, Hk and the number of multiprocessors, but not on N.

    Args:
        q: (N, H, D), floating point; N is a multiple of S.
        k_pages: (P, B, Hk, D), the dtype of ``q``; H is a multiple of Hk. Written in place if
            ``new_k`` is given.
        v_pages: (P, B, Hk, D), the dtype of ``q``; written in place if ``new_v`` is given.
        page_table: (S, M), int32, the pages of each sequence in order.
        lengths: (S,), int32, in [0, M * B]: keys of each sequence, including the new one.
        new_k: (N, Hk, D), the dtype of ``q``, only with ``new_v`` and N = S; by default all keys
            are already in pages.
        new_v: (N, Hk, D), the dtype of ``q``.
        scale: Factor of the scores; ``D ** -0.5`` by default.
        splits: Programs among which the keys of a sequence and head are divided; a second kernel
            merges several. By default as few as fill the GPU. The reference ignores it.
        backend: Implementation to use; by default the fastest that supports the call.

    Returns:
        (N, H, D), the dtype of ``q``.

    Raises:
        ValueError: An argument is invalid. The values of ``page_table`` and ``lengths`` are
            checked only on a CPU, as the check would wait for a GPU. On a GPU an invalid page makes
            the rows of its sequence NaN, and a longer length is treated as ``M * B``.
        RuntimeError: A tensor requires a gradient and grad mode is enabled.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.

    References:
        Kwon et al., 2023, https://arxiv.org/abs/2309.06180 (pages); Dao et al., 2023,
        https://crfm.stanford.edu/2023/10/12/flashdecoding.html (splits).
    """
    if torch.is_autocast_enabled(q.device.type):
        # The pages have the dtype of autocast or a wider one.
        q = q.to(k_pages.dtype)
        new_k, new_v = (None if x is None else x.to(k_pages.dtype) for x in (new_k, new_v))
    checks.check_shape(_NAME, "q", q, "(N, H, D)", None, None, None)
    count, heads, width = q.shape
    paged.check_pages(_NAME, k_pages, v_pages, None, width, "(P, B, Hk, D)")
    key_heads = k_pages.shape[2]
    if heads % key_heads if key_heads else heads:
        rule = f"have a multiple of Hk = {key_heads} heads, as many as `k_pages`"
        raise checks.wrong(_NAME, "q", rule, tuple(q.shape))
    paged.check_int32(_NAME, "page_table", page_table, k_pages, "(S, M)", None, None)
    sequences = page_table.shape[0]
    paged.check_int32(_NAME, "lengths", lengths, k_pages, "(S,)", sequences)
    if count % sequences if sequences else count:
        rule = f"have a multiple of S = {sequences} rows, as many as `page_table`"
        raise checks.wrong(_NAME, "q", rule, tuple(q.shape))
    if (new_k is None) != (new_v is None):
        raise ValueError(f"{_NAME}: `new_k` and `new_v` come together, or not at all.")
    for name, new in (("new_k", new_k), ("new_v", new_v)):
        if new is not None:
            checks.check_shape(_NAME, name, new, "(N, Hk, D), N = S,", sequences, key_heads, width)
            checks.check_shape(_NAME, "q", q, "(N, H, D), as `new_k`,", sequences, heads, width)
    checks.check_floating(_NAME, q=q, k_pages=k_pages, v_pages=v_pages, new_k=new_k, new_v=new_v)
    if splits is not None and not splits >= 1:
        raise checks.wrong(_NAME, "splits", "be at least 1", splits)
    arguments = DecodeArguments(
        *(q, k_pages, v_pages, page_table, lengths, new_k, new_v),
        width**-0.5 if scale is None else float(scale),
        splits,
    )
    return OPERATION(arguments, backend)
