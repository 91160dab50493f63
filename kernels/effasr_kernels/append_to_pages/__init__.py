"""Writing keys and values of new rows to their places in pages."""

from dataclasses import dataclass

from torch import Tensor

from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.runtime.example import HEADS, WIDTH, Example, ExampleInputs, Keywords
from effasr_kernels.runtime.torch_op import ForwardOnlyOp
from effasr_kernels.shared import paged


@dataclass(frozen=True, slots=True)
class AppendArguments:
    k: Tensor
    v: Tensor
    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    positions: Tensor


def _example(inputs: ExampleInputs) -> Keywords:
    return {
        "k": inputs.floating(3, HEADS, WIDTH),
        "v": inputs.floating(3, HEADS, WIDTH),
        "k_pages": inputs.floating(6, 16, HEADS, WIDTH),
        "v_pages": inputs.floating(6, 16, HEADS, WIDTH),
        "page_table": inputs.integers([5, 1], [0, 0], [2, 4]),
        "positions": inputs.integers(23, -1, 15),
    }


OPERATION = ForwardOnlyOp(
    "append_to_pages",
    AppendArguments,
    outputs=lambda _: None,
    flops=lambda _: 0,
    results=0,
    written=("k_pages", "v_pages"),
    examples=[Example("append_to_pages", _example, 0)],
)

_NAME = OPERATION.name


def append_to_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    *,
    backend: Backend | str | None = None,
) -> None:
    """Write row n of ``k`` and ``v`` to key ``positions[n]`` of its sequence, in place.

    That is row ``positions[n] % B`` of page ``page_table[n, positions[n] // B]``. Rows with a
    negative position are skipped, whatever they and their row of the table hold. The operation is
    for many rows at once, such as a prompt or the keys of encoded speech; `decode_attention` itself
    writes one new token of each sequence. If two rows have the same position of the same page, the
    result there is undefined. Shapes are static and the host does not wait for the device, so a
    call can be captured in a CUDA graph. There is no gradient.

    Args:
        k: (N, H, D), floating point.
        v: (N, H, D), the dtype of ``k``.
        k_pages: (P, B, H, D), the dtype of ``k``; written in place.
        v_pages: (P, B, H, D), the dtype of ``k``; written in place.
        page_table: (N, M), int32, the pages of each row's sequence.
        positions: (N,), int32, each less than ``M * B``.
        backend: Implementation to use; by default the fastest that supports the call.

    Raises:
        ValueError: An argument is invalid. The values of ``page_table`` and ``positions`` are
            checked only on a CPU, as the check would wait for a GPU. On a GPU a row with an invalid
            page or position is not written.
        RuntimeError: A tensor requires a gradient and grad mode is enabled.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    checks.check_shape(_NAME, "k", k, "(N, H, D)", None, None, None)
    checks.check_shape(_NAME, "v", v, "(N, H, D)", *k.shape)
    paged.check_pages(_NAME, k_pages, v_pages, k.shape[1], k.shape[2])
    checks.check_floating(_NAME, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    rows = k.shape[0]
    paged.check_int32(_NAME, "page_table", page_table, k_pages, "(N, M)", rows, None)
    paged.check_int32(_NAME, "positions", positions, k_pages, "(N,)", rows)
    OPERATION(AppendArguments(k, v, k_pages, v_pages, page_table, positions), backend)
