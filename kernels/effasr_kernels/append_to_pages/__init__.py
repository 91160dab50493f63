"""Writing keys and values of new rows to their places in pages."""

from __future__ import annotations

from torch import Tensor

from effasr_kernels.append_to_pages.definition import OPERATION, AppendArguments
from effasr_kernels.runtime import checks
from effasr_kernels.runtime.dispatch import Backend
from effasr_kernels.shared import paged

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
    negative position are skipped, whatever they and their row of the table hold. Used where many
    rows come at once: a prompt, or the keys of encoded speech. For one new token of each sequence,
    `decode_attention` does it on the way. What two rows with the same place leave there is
    undefined. Shapes are static and nothing waits for the device, so a call can be recorded in a
    CUDA graph. There is no gradient.

    Args:
        k: (N, H, D), floating point.
        v: (N, H, D), as ``k``.
        k_pages: (P, B, H, D), the dtype of ``k``; written to.
        v_pages: (P, B, H, D), likewise.
        page_table: (N, M), int32, the pages of each row's sequence.
        positions: (N,), int32, each less than ``M * B``.
        backend: Implementation to use; the fastest that can serve the call by default.

    Raises:
        ValueError: An argument is not as above. The values of ``page_table`` and ``positions`` are
            checked on a CPU only, as a check would wait for a GPU: there, a row without a place is
            not written.
        RuntimeError: A tensor requires a gradient, and autograd is on.
        BackendUnavailable: See `effasr_kernels.runtime.dispatch.Dispatcher.select`.
    """
    checks.check_shape(_NAME, "k", k, "(N, H, D)", None, None, None)
    checks.check_shape(_NAME, "v", v, "(N, H, D)", *k.shape)
    paged.check_pages(_NAME, k_pages, v_pages, *k.shape[1:])
    checks.check_floating(_NAME, k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    rows = k.shape[0]
    paged.check_int32(_NAME, "page_table", page_table, k_pages, "(N, M)", rows, None)
    paged.check_int32(_NAME, "positions", positions, k_pages, "(N,)", rows)
    arguments = AppendArguments(k, v, k_pages, v_pages, page_table, positions)
    OPERATION(arguments, backend)
