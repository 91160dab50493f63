"""Computes losses of some validation utterances, also with other utterances' encoder output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lhotse.cut import Cut
from torch import Tensor

from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.batch import Batch
from effasr.data.collate import Example, collate
from effasr.data.manifest.reader import request
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.transducer_greedy import transducer_greedy
from effasr.model.asr import ASRModel
from effasr.nn.parameters import evaluating
from effasr.training.diagnostics.probe_sums import ProbeSums
from effasr_kernels import PackedSequence, linear_cross_entropy, pack

_MAX_SYMBOLS = 10
"""Largest number of labels per frame in the transducer's greedy search."""


class Probe:
    """Computes `ProbeSums` of a fixed set of utterances.

    The utterances are evenly spaced over the cuts and packed into batches. Those that cannot be
    read or are too long for the model are left out.
    """

    def __init__(
        self,
        cuts: Sequence[Cut],
        model: ASRModel,
        tokenizer: Tokenizer,
        *,
        count: int,
        frame_budget: int,
        precision: str = "float32",
    ) -> None:
        """Choose the utterances; the first call reads their audio and keeps it.

        Args:
            cuts: Cuts with one supervision each, sorted by duration, so that the other audio
                differs in content and hardly in length.
            model: The model; a call uses its current weights and restores its training mode.
            tokenizer: Tokenizer of the model.
            count: Largest number of utterances.
            frame_budget: Largest number of encoder frames in a batch.
            precision: Dtype of matrix products: ``float32`` or ``bfloat16``.
        """
        chosen = min(count, len(cuts))
        self._cuts = [cuts[index * len(cuts) // chosen] for index in range(chosen)]
        self._model, self._tokenizer = model, tokenizer
        self._budget, self._precision = frame_budget, precision
        self._batches: list[Batch] | None = None

    @torch.no_grad()
    def __call__(self) -> ProbeSums:
        """Compute the losses with the current weights."""
        if self._batches is None:
            self._batches = list(self._collated())
        device, sums = next(self._model.parameters()).device, ProbeSums()
        half = self._precision == "bfloat16"
        with evaluating(self._model), torch.autocast(device.type, torch.bfloat16, enabled=half):
            for batch in self._batches:
                sums += self._measure(batch.to(device))
        return sums

    def _collated(self) -> Iterator[Batch]:
        """Yield batches of at most the frame budget, or of one utterance."""
        framing = self._model.config.features.framing
        group: list[Example] = []
        frames = 0
        for cut in self._cuts:
            if (example := self._example(cut)) is None:
                continue
            length = framing.frames(len(example.audio))
            if group and frames + length > self._budget:
                yield self._collate(group)
                group, frames = [], 0
            group.append(example)
            frames += length
        if group:
            yield self._collate(group)

    def _collate(self, examples: Sequence[Example]) -> Batch:
        return collate(
            examples,
            eos_id=self._tokenizer.eos_id,
            pad_id=self._tokenizer.pad_id,
            framing=self._model.config.features.framing,
        )

    def _example(self, cut: Cut) -> Example | None:
        """Return the utterance, or None if it cannot be read or is too long for the model."""
        config = self._model.config
        texts = [supervision.text for supervision in cut.supervisions]
        if len(texts) != 1 or not texts[0]:
            return None
        named = config.named_experts()
        try:
            wanted = request(cut)
            expert = None if named is None else named.number_of(wanted)
            prompt = self._tokenizer.prompt(wanted)
            text = self._tokenizer.encode(texts[0], wanted.target)
            audio = load_audio(cut, config.features.sample_rate)
        except (AudioError, ValueError):
            # The evaluation of the same set reports the error.
            return None
        frames = config.features.framing.frames(len(audio))
        most = config.encoder.max_frames
        positions = None if config.decoder is None else config.decoder.max_positions
        if not frames or (most is not None and frames > most):
            return None
        if positions is not None and len(prompt) + len(text) > positions:
            return None
        return Example(cut.id, audio, prompt, text, wanted.monotonic, expert=expert)

    def _measure(self, batch: Batch) -> ProbeSums:
        model = self._model
        # This bypasses hooks and a compiled forward, because these batches have other shapes.
        losses = model.forward(batch)
        encoded = model.encode(batch)
        aligned = [index for index, yes in enumerate(batch.monotonic.tolist()) if yes]
        targets, every = float(batch.num_monotonic_targets), encoded.unpack()
        frames = float(sum(batch.frame_lengths[index] for index in aligned))
        sums = ProbeSums(tokens=float(batch.text.layout.total), frames=frames)
        if model.decoder is not None:
            sums += ProbeSums(targets=float(batch.num_targets), own=float(losses.cross_entropy))
            if len(every) > 1:
                others = pack([*every[1:], every[0]])
                sums += ProbeSums(
                    paired_targets=float(batch.num_targets),
                    paired_own=float(losses.cross_entropy),
                    paired_other=float(self._cross_entropy(batch, others)),
                )
        if not aligned:
            return sums
        spoken = pack([every[index] for index in aligned])
        if model.ctc_head is not None:
            best = model.ctc_logits(spoken.values).argmax(-1)
            sums += ProbeSums(
                ctc_targets=targets,
                ctc_loss=float(losses.ctc),
                ctc_frames=frames,
                ctc_blanks=float((best == model.vocab_size).sum()),
            )
        if model.transducer is not None:
            sums += ProbeSums(transducer_targets=targets, transducer_loss=float(losses.transducer))
            if model.transducer.config.durations is None:
                said = transducer_greedy(model.transducer, spoken, _MAX_SYMBOLS)
                sums += ProbeSums(transducer_frames=frames, labels=float(sum(map(len, said))))
        return sums

    def _cross_entropy(self, batch: Batch, encoded: PackedSequence) -> Tensor:
        """Return the summed cross-entropy of the batch with ``encoded``: float32 ()."""
        decoder = self._model.decoder
        assert decoder is not None
        hidden, _ = self._model.decode(batch.tokens, encoded)
        return linear_cross_entropy(
            hidden, decoder.output_weight, batch.targets, bias=decoder.output_bias
        ).sum()
