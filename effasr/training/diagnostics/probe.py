"""Measures the losses of some validation utterances, also with other utterances' audio."""

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
from effasr.training.diagnostics.probe_sums import ProbeSums
from effasr.transcription.recognizer import evaluating
from effasr_kernels import PackedSequence, linear_cross_entropy, pack

_MAX_SYMBOLS = 10
"""Most labels of a frame in the transducer's greedy search."""


class Probe:
    """Computes `ProbeSums` of the same utterances again and again.

    They are evenly spaced over the cuts, and packed into batches. Those that cannot be read or are
    too long for the model are left out.
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
        """Choose the utterances; audio is read at the first call, and kept.

        Args:
            cuts: With one supervision each; those of like duration next to each other, so that
                other audio differs in what is said, and not in its length.
            model: The model, with its current weights; its training mode is restored.
            tokenizer: Of the model.
            count: Most utterances.
            frame_budget: Encoder frames of a batch.
            precision: ``float32`` or ``bfloat16``, of matrix products.
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
        """The batches, each of at most the budget, or of one utterance."""
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
        """The utterance; None if it cannot be read, or is too long for the model."""
        config = self._model.config
        texts = [supervision.text for supervision in cut.supervisions]
        if len(texts) != 1 or not texts[0]:
            return None
        try:
            wanted = request(cut)
            prompt = self._tokenizer.prompt(wanted)
            text = self._tokenizer.encode(texts[0], wanted.target)
            audio = load_audio(cut, config.features.sample_rate)
        except (AudioError, ValueError):
            # The evaluation of the same set names it.
            return None
        frames = config.features.framing.frames(len(audio))
        most = config.encoder.max_frames
        positions = None if config.decoder is None else config.decoder.max_positions
        if not frames or (most is not None and frames > most):
            return None
        if positions is not None and len(prompt) + len(text) > positions:
            return None
        return Example(cut.id, audio, prompt, text, wanted.monotonic)

    def _measure(self, batch: Batch) -> ProbeSums:
        model = self._model
        # Not through hooks or a compiled forward: these batches have shapes of their own.
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
        """Cross-entropy of the batch with this encoder output, summed: float32 ()."""
        decoder = self._model.decoder
        assert decoder is not None
        hidden, _ = self._model.decode(batch.tokens, encoded)
        return linear_cross_entropy(
            hidden, decoder.output_weight, batch.targets, bias=decoder.output_bias
        ).sum()
