from __future__ import annotations

from effasr_kernels.append_to_pages import AppendArguments
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.shared.paged import check_page_numbers


def run(a: AppendArguments) -> None:
    k_pages, page_table, positions = a.k_pages, a.page_table, a.positions
    rows = (positions >= 0).nonzero().squeeze(1)
    if not rows.numel():
        return
    places = positions[rows].long()
    size, room = k_pages.shape[1], page_table.shape[1] * k_pages.shape[1]
    if int(places.max()) >= room:
        rule = f"be less than M * B = {room}"
        raise wrong("append_to_pages", "positions", rule, int(places.max()))
    pages = page_table[rows, places // size].long()
    check_page_numbers("append_to_pages", pages.tolist(), k_pages.shape[0])
    k_pages[pages, places % size] = a.k[rows]
    a.v_pages[pages, places % size] = a.v[rows]
