import torch.nn.functional as F
from torch import Tensor

from effasr_kernels.gated_activation import GatedArguments
from effasr_kernels.shared.ragged import widen


def run(a: GatedArguments) -> Tensor:
    gate = widen(a.gate)
    if a.activation == "silu":
        activated = F.silu(gate)
    else:
        activated = F.gelu(gate, approximate="tanh" if a.activation == "gelu_tanh" else "none")
    return (activated * widen(a.up)).to(a.gate.dtype)
