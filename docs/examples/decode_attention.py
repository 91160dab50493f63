import torch
from torch.nn.functional import scaled_dot_product_attention

from effasr_kernels import decode_attention

# Two hypotheses, 2 heads of width 16, keys in pages of 4.
k_pages, v_pages = torch.randn(4, 4, 2, 16), torch.randn(4, 4, 2, 16)
page_table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)
lengths = torch.tensor([6, 3], dtype=torch.int32)  # including the new key of each
q, new_k, new_v = (torch.randn(2, 2, 16) for _ in range(3))

y = decode_attention(q, k_pages, v_pages, page_table, lengths, new_k=new_k, new_v=new_v)

# The new key of the first hypothesis has been written to key 5: row 1 of its second page.
torch.testing.assert_close(k_pages[0, 1], new_k[0])
keys = torch.cat([k_pages[2], k_pages[0, :2]]).transpose(0, 1)  # (heads, 6, width)
values = torch.cat([v_pages[2], v_pages[0, :2]]).transpose(0, 1)
expected = scaled_dot_product_attention(q[0][:, None], keys, values)[:, 0]
torch.testing.assert_close(y[0], expected)
