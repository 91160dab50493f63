import torch
from torch import Tensor

from effasr_kernels.mask_features import MaskArguments
from effasr_kernels.shared.slots import row_positions, rows_of


def run(a: MaskArguments) -> Tensor:
    count, channels = a.layout.num_sequences, a.x.shape[1]
    in_band = torch.zeros(count, channels, dtype=torch.bool, device=a.x.device)
    if a.freq_shares is not None:
        extent = torch.full((count, 1), channels, device=a.x.device)
        begin, end = _masks(a.freq_shares, extent, extent.clamp(max=a.freq_width))
        channel = torch.arange(channels, device=a.x.device)
        in_band = ((channel >= begin[..., None]) & (channel < end[..., None])).any(1)
    y = a.x.masked_fill(rows_of(in_band, a.layout, a.rows_per_slot, tail=1), 0.0)
    if a.time_shares is not None:
        extent = a.lengths.long()[:, None]
        begin, end = _masks(a.time_shares, extent, (extent * a.time_width).long())
        row = row_positions(a.layout, a.rows_per_slot)[:, None]
        begin, end = (rows_of(x, a.layout, a.rows_per_slot) for x in (begin, end))
        y = y.masked_fill_(((row >= begin) & (row < end)).any(1, keepdim=True), 0.0)
    return y


def _masks(shares: Tensor, extent: Tensor, widest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the begin and end of masks inside ``0:extent``: two int64 (N, masks)."""
    # A share is below 1, but its product with an integer in float32 may round up to that integer.
    width = torch.minimum((shares[0] * (widest + 1)).long(), widest)
    last = extent - width
    begin = torch.minimum((shares[1] * (last + 1)).long(), last)
    return begin, begin + width
