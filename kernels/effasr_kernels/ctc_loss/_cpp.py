"""`ctc_loss` on a CPU, with the lattices in C++.

Sequences are computed in groups. For each group, torch computes the log-probabilities of all
classes; the lattices read the logits of the blank and of the transcript's labels and return their
occupancies. The gradient of the logits then overwrites the log-probabilities and is multiplied
with the inputs. In addition to the arguments and their gradients, the memory of one group is
needed: 64 MiB, or more for a single sequence that does not fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from effasr_kernels.ctc_loss import CtcArguments
from effasr_kernels.packed import PackedLayout
from effasr_kernels.runtime.checks import check_labels
from effasr_kernels.shared import lattice
from effasr_kernels.shared.lattice_losses import differentiable
from effasr_kernels.shared.ragged import widen

_GROUP_BYTES = 64 * 2**20


def run(a: CtcArguments) -> Tensor:
    labels = a.targets[: a.layout_targets.total]
    exception = f" other than the blank {a.blank_id}"
    check_labels("ctc_loss", labels, a.weight.shape[0], exception, a.blank_id)
    losses = _Losses(a.layout_frames, a.layout_targets, labels.long(), a.blank_id)
    inputs = {"hidden": widen(a.hidden), "weight": widen(a.weight)}
    if a.bias is not None:
        inputs["bias"] = widen(a.bias)
    return differentiable("ctc_loss", losses, inputs)


@dataclass(frozen=True, slots=True)
class _Losses:
    """See `shared.lattice_losses.Losses`; inputs are hidden, weight, optionally bias."""

    frames: PackedLayout
    labels: PackedLayout
    targets: Tensor
    blank_id: int

    def __call__(
        self,
        inputs: tuple[Tensor, ...],
        scales: Tensor | None = None,
        gradients: tuple[Tensor, ...] = (),
    ) -> Tensor:
        hidden, weight, *_ = inputs
        losses = hidden.new_empty(self.frames.num_sequences)
        for gradient in gradients:
            gradient.zero_()
        transcripts = self.targets.split(self.labels.lengths)
        for begin, end in self.groups(weight.shape[0]):
            columns = self._columns(transcripts[begin:end])
            scale = None if scales is None else scales[begin:end]
            losses[begin:end] = self._group(inputs, begin, end, columns, scale, gradients)
        return losses

    def groups(self, classes: int) -> Iterator[tuple[int, int]]:
        begin, frames, longest = 0, 0, 0
        lengths = zip(self.frames.lengths, self.labels.lengths, strict=True)
        for n, (t, u) in enumerate(lengths):
            frames, longest = frames + t, max(longest, u)
            # The logits of a frame and, for each label of the longest transcript, to which the
            # others are padded, its class twice, its score and the lattice's workspace.
            size = 4 * frames * (classes + 8 * (longest + 1))
            if n > begin and size > _GROUP_BYTES:
                yield begin, n
                begin, frames, longest = n, t, u
        if begin < self.frames.num_sequences:
            yield begin, self.frames.num_sequences

    def _columns(self, transcripts: tuple[Tensor, ...]) -> Tensor:
        """Return the blank and the labels of each sequence, int64 (n, K + 1), padded with -1."""
        labels = pad_sequence(list(transcripts), batch_first=True, padding_value=-1)
        return F.pad(labels, (1, 0), value=self.blank_id)

    def _group(
        self,
        inputs: tuple[Tensor, ...],
        begin: int,
        end: int,
        columns: Tensor,
        scale: Tensor | None,
        gradients: tuple[Tensor, ...],
    ) -> Tensor:
        """Return the losses of sequences ``begin`` to ``end`` and add to the gradients."""
        hidden, weight, *bias = inputs
        cu_frames = self.frames.cu_seqlens[begin : end + 1]
        rows = slice(int(cu_frames[0]), int(cu_frames[-1]))
        cu_frames = cu_frames - rows.start
        cu_labels = self.labels.cu_seqlens[begin : end + 1].contiguous()
        log_probs = F.linear(hidden[rows], weight, *bias).log_softmax(-1)
        lengths = cu_frames.diff()
        repeat = lambda x: x.repeat_interleave(lengths, 0, output_size=log_probs.shape[0])
        classes = repeat(columns)
        # The lattice neither reads nor writes the padding, so it stays zero.
        scores = log_probs.gather(1, classes.clamp(min=0)).masked_fill_(classes < 0, 0)
        arguments = scores, None, self.targets, cu_frames, cu_labels
        if not gradients:
            return 0 - lattice.ctc(*arguments)
        losses = (0 - lattice.ctc(*arguments, occupancies=scores)).to(hidden.dtype)
        scale = torch.ones_like(losses) if scale is None else scale
        of_rows = repeat(scale.masked_fill(losses.isinf(), 0))[:, None]
        dz = log_probs.exp_().mul_(of_rows)
        dz.scatter_add_(1, classes.clamp_(min=0), scores.mul_(-of_rows))
        of_hidden, of_weight, *of_bias = gradients
        torch.mm(dz, weight, out=of_hidden[rows])
        of_weight.addmm_(dz.T, hidden[rows])
        for gradient in of_bias:
            gradient += dz.sum(0)
        return losses
