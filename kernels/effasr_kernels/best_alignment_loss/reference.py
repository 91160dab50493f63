import torch
from torch import Tensor

from effasr_kernels.best_alignment_loss import AlignmentArguments
from effasr_kernels.shared.ragged import split_rows, widen


def run(a: AlignmentArguments) -> Tensor:
    pieces = split_rows(widen(a.speech), a.layout_speech), split_rows(widen(a.text), a.layout_text)
    begins = a.layout_text.cu_seqlens_host
    chosen = [
        _align(x.detach(), y.detach()) + begin if len(y) else x.new_full((len(x),), -1).long()
        for x, y, begin in zip(*pieces, begins, strict=False)
        if len(x)
    ]
    no_frames = torch.empty(0, dtype=torch.int64, device=a.speech.device)
    return mean_distances(a, torch.cat([no_frames, *chosen]))


def mean_distances(a: AlignmentArguments, chosen: Tensor) -> Tensor:
    """The losses of the frames' rows of ``text``, int64 (total,), -1 where there are none."""
    has_token = chosen >= 0
    x = widen(a.speech)[: len(chosen)][has_token]
    y = widen(a.text).index_select(0, chosen[has_token])
    sequence = a.layout_speech.sequence_ids()[: len(chosen)][has_token]
    sums = x.new_zeros(a.layout_speech.num_sequences)
    sums = sums.index_add(0, sequence, (x - y).square().mean(1))
    frames, tokens = a.layout_speech.cu_seqlens.diff(), a.layout_text.cu_seqlens.diff()
    return (sums / frames.clamp(min=1)).where((frames == 0) | (tokens > 0), torch.inf)


def _align(x: Tensor, y: Tensor) -> Tensor:
    """The token of each frame of one sequence, int64 (T_n,)."""
    # Without the squares of the frames, which all alignments have in common.
    scores = (y.square().sum(1) - 2 * x @ y.mT).double()
    best, moves = scores.new_zeros(len(y)), []
    for score in scores:
        reached = best + score
        best = reached.cummin(0).values
        moves.append(best < reached)
    token, tokens = len(y) - 1, []
    for comes_from_before in reversed(torch.stack(moves).tolist()):
        while comes_from_before[token]:
            token -= 1
        tokens.append(token)
    return torch.tensor(tokens[::-1], device=x.device)
