"""Checks of paged keys and values, for the operations that read and write them.

A page has B rows of all heads, (B, H, D). Key j of a sequence is row ``j % B`` of the page in
column ``j // B`` of the sequence's row of the page table. The caller assigns pages: sequences may
share a page, and pages may have any order.
"""

import torch
from torch import Tensor

from effasr_kernels.runtime import checks


def check_pages(
    op: str,
    k_pages: Tensor,  # keys
    v_pages: Tensor,  # values
    heads: int | None,  # H; None accepts any number
    width: int,  # D
    letters: str = "(P, B, H, D)",  # the shape, for the message
) -> None:
    checks.check_shape(op, "k_pages", k_pages, letters, None, None, heads, width)
    checks.check_shape(op, "v_pages", v_pages, letters, *k_pages.shape)
    if not k_pages.shape[1]:
        raise checks.wrong(op, "k_pages", "have pages of at least 1 row", tuple(k_pages.shape))


def check_int32(
    op: str, name: str, tensor: Tensor, like: Tensor, letters: str, *sizes: int | None
) -> None:
    checks.check_shape(op, name, tensor, letters, *sizes)
    if tensor.dtype != torch.int32:
        raise checks.wrong(op, name, "be torch.int32", tensor.dtype)
    if tensor.device != like.device:
        raise checks.wrong(op, name, f"be on {like.device}, as `k_pages` is", tensor.device)


def check_page_numbers(op: str, pages: list[int], count: int) -> None:
    """Check the used entries of a page table, if they are known on the host."""
    invalid = next((page for page in pages if not 0 <= page < count), None)
    if invalid is not None:
        rule = f"name pages in [0, {count}) wherever a key is needed"
        raise checks.wrong(op, "page_table", rule, invalid)


def refuse_pages(k_pages: Tensor, v_pages: Tensor) -> str | None:
    """The reason why kernels do not support these pages, or None."""
    # Pages that kernels write to cannot be replaced by a contiguous copy.
    if any(x.numel() and x.shape[3] > 1 and x.stride(3) != 1 for x in (k_pages, v_pages)):
        return "needs pages whose channels are contiguous"
    return None
