"""CTC prefix beam search of streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from effasr.decoding.ctc_beam import Fusion, Prefixes
from effasr.decoding.nbest.hypothesis import Hypothesis, NBest
from effasr.decoding.streaming.beam import BeamStreams, OpenTranscript, keep_consistent, opened
from effasr.model.asr import ASRModel


class CTCBeamStreams(BeamStreams):
    """Decodes as `effasr.decoding.ctc_beam`; a symbol is not repeated across segments either.

    The open transcript is the best one if the stream ended there. A language model reads each
    segment as a text of its own.
    """

    def __init__(
        self, model: ASRModel, slots: int, beam: int, nbest: int, fusion: Fusion | None = None
    ):
        """Prepare a number of slots: see `BeamStreams`."""
        super().__init__(slots, beam, nbest)
        self._model, self._fusion = model, fusion
        self._device = next(model.parameters()).device
        with torch.inference_mode():
            self._prefixes = Prefixes.begin(slots, beam, self._device, with_frames=True)

    def _begin(self, slot: int) -> None:
        self._put([slot], Prefixes.begin(1, self.beam, self._device, with_frames=True))

    def _advance(self, encoded: Tensor, frames: Sequence[int]) -> None:
        logits = self._model.ctc_logits(encoded.flatten(0, 1))
        steps = logits.float().log_softmax(-1).double().view(*encoded.shape[:2], -1)
        for frame in range(max(frames)):
            index = [slot for slot, count in enumerate(frames) if count > frame]
            numbers = torch.tensor([self._read[slot] + frame for slot in index])
            at = numbers[:, None].to(self._device)
            if len(index) == len(frames):
                self._prefixes = self._prefixes.read(steps[:, frame], at, self._fusion)
            else:
                own = self._prefixes.keep(self._index(index))
                self._put(index, own.read(steps[index, frame], at, self._fusion))
        self._prefixes = self._prefixes.trimmed()

    def _likeliest(self, slots: Sequence[int]) -> list[OpenTranscript]:
        own = self._prefixes.keep(self._index(slots))
        best = own.ranks(self._fusion).argmax(1)
        return opened(own.labels, own.frames, best, [self._read[slot] for slot in slots])

    def _hypotheses(self, slot: int) -> list[Hypothesis]:
        return self._listed(slot, self.beam)

    def _ended(self, slot: int) -> list[Hypothesis]:
        return self._listed(slot, self.nbest)

    def _listed(self, slot: int, size: int) -> list[Hypothesis]:
        found = NBest(1, size)
        self._prefixes.keep(self._index([slot])).record([0], 0, self._fusion, found)
        return found.lists()[0]

    def _keep(self, slot: int, final: Sequence[int], since: int) -> None:
        own = self._prefixes.keep(self._index([slot]))
        agrees, labels, frames, counts = keep_consistent(
            own.labels, own.frames, own.counts, final, since
        )
        heard = torch.logaddexp(own.blank, own.label).masked_fill(~agrees, -torch.inf)
        best = (heard + own.written).argmax(1, keepdim=True)
        base = heard.gather(1, best)
        rest = replace(
            own,
            blank=(own.blank - base).masked_fill(~agrees, -torch.inf),
            label=(own.label - base).masked_fill(~agrees, -torch.inf),
            written=(own.written - own.written.gather(1, best)).masked_fill(~agrees, 0),
            counts=counts,
            labels=labels,
            frames=frames,
            before=torch.full_like(own.before, final[-1]) if final else own.before,
        )
        self._put([slot], rest)
        self._prefixes = self._prefixes.trimmed()

    def _put(self, index: Sequence[int], part: Prefixes) -> None:
        self._prefixes = self._prefixes.put(self._index(index), part)

    def _index(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, device=self._device)
