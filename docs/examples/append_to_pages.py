import torch

from effasr_kernels import append_to_pages

# Keys of two sequences in pages of 4: the first has pages 2 and 0, the second pages 1 and 3.
k_pages, v_pages = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
page_table = torch.tensor([[2, 0], [2, 0], [1, 3]], dtype=torch.int32)  # a row per new key
positions = torch.tensor([3, 4, 0], dtype=torch.int32)

append_to_pages(k, v, k_pages, v_pages, page_table, positions)

torch.testing.assert_close(k_pages[2, 3], k[0])  # key 3 of the first sequence
torch.testing.assert_close(k_pages[0, 0], k[1])  # key 4 is in its next page
torch.testing.assert_close(v_pages[1, 0], v[2])
