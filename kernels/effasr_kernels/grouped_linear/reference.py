from torch import Tensor

from effasr_kernels.grouped_linear import GroupedLinearArguments
from effasr_kernels.shared.cpu.linear import linear
from effasr_kernels.shared.ragged import join_rows, split_rows, widen


def run(a: GroupedLinearArguments) -> Tensor:
    weights = widen(a.weight).unbind(0)
    biases = [None] * len(weights) if a.bias is None else widen(a.bias).unbind(0)
    groups = zip(split_rows(widen(a.x), a.layout), weights, biases, strict=True)
    # Empty groups, too: their weights have a zero gradient, for which other ranks may wait.
    return join_rows([linear(x, weight, bias) for x, weight, bias in groups], a.layout, a.x)
