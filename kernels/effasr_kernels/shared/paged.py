"""Paged keys and values: what the operations that read and write them have in common.

A page is B rows of all heads, (B, H, D). Key j of a sequence is row ``j % B`` of its page number
``j // B``, which the sequence's row of a page table names. Which pages are whose is up to the
caller: two sequences may name the same one, and none need be in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from effasr_kernels.runtime import checks


def check_pages(op: str, k_pages: Tensor, v_pages: Tensor, heads: int, width: int) -> None:
    """Check the shapes of keys and values, (P, B, H, D) both, and that a page has rows.

    Raises:
        ValueError: They have others.
    """
    checks.check_shape(op, "k_pages", k_pages, "(P, B, H, D)", None, None, heads, width)
    checks.check_shape(op, "v_pages", v_pages, "(P, B, H, D)", *k_pages.shape)
    if not k_pages.shape[1]:
        raise checks.wrong(op, "k_pages", "have pages of at least 1 row", tuple(k_pages.shape))


def check_int32(
    op: str, name: str, tensor: Tensor, like: Tensor, letters: str, *sizes: int | None
) -> None:
    """Check a tensor of int32 that lies where the pages do.

    Raises:
        ValueError: Its dtype, device or shape is another.
    """
    checks.check_shape(op, name, tensor, letters, *sizes)
    if tensor.dtype != torch.int32:
        raise checks.wrong(op, name, "be torch.int32", tensor.dtype)
    if tensor.device != like.device:
        raise checks.wrong(op, name, f"be on {like.device}, as `k_pages` is", tensor.device)


def check_page_numbers(op: str, pages: list[int], count: int) -> None:
    """Check entries of a page table that are needed; where the host knows them.

    Raises:
        ValueError: One is no page.
    """
    wrong = next((page for page in pages if not 0 <= page < count), None)
    if wrong is not None:
        rule = f"name pages in [0, {count}) wherever a key is needed"
        raise checks.wrong(op, "page_table", rule, wrong)


def refuse_pages(k_pages: Tensor, v_pages: Tensor) -> str | None:
    """Why kernels cannot work on these pages, or None; they cannot be copied to be written to."""
    if any(x.numel() and x.shape[3] > 1 and x.stride(3) != 1 for x in (k_pages, v_pages)):
        return "needs pages whose channels are contiguous"
    return None
