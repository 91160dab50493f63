from effasr_kernels.append_to_pages import AppendArguments
from effasr_kernels.runtime.checks import wrong
from effasr_kernels.shared.paged import check_page_numbers


def run(a: AppendArguments) -> None:
    k_pages, page_table, positions = a.k_pages, a.page_table, a.positions
    rows = (positions >= 0).nonzero().squeeze(1)
    if not rows.numel():
        return
    keys = positions[rows].long()
    size, capacity = k_pages.shape[1], page_table.shape[1] * k_pages.shape[1]
    if int(keys.max()) >= capacity:
        rule = f"be less than M * B = {capacity}"
        raise wrong("append_to_pages", "positions", rule, int(keys.max()))
    pages = page_table[rows, keys // size].long()
    check_page_numbers("append_to_pages", pages.tolist(), k_pages.shape[0])
    k_pages[pages, keys % size] = a.k[rows]
    a.v_pages[pages, keys % size] = a.v[rows]
