"""Losses of some validation utterances, also with other utterances' encoder output."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from lhotse.cut import Cut
from torch import Tensor

from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.batch import Batch
from effasr.data.collate import Example, collate
from effasr.data.features.frame_geometry import Framing
from effasr.data.manifest.cuts import prompt_of
from effasr.data.tokenizer import Tokenizer
from effasr.model.asr import ASRModel
from effasr.nn.experts import EncoderOutput
from effasr.nn.parameters import evaluating
from effasr_kernels import PackedSequence, linear_cross_entropy, pack

_MAX_SYMBOLS = 10
"""Largest number of labels per frame in the transducer's greedy search."""


def _ratio(total: str, *counts: str) -> property:
    """A mean over what some fields count; None where they count nothing."""

    def mean(sums: "ProbeSums") -> float | None:
        count = sum(getattr(sums, name) for name in counts)
        return getattr(sums, total) / count if count else None

    return property(mean)


@dataclass(frozen=True, slots=True)
class ProbeSums:
    """Sums over utterances; ``+`` adds the sums of parts of a set. Means are in nats a target."""

    # Of the decoder: targets, and their cross-entropy.
    targets: float = 0.0
    own: float = 0.0
    # The same for utterances that were also decoded with encoder output of another one.
    paired_targets: float = 0.0
    paired_own: float = 0.0
    paired_other: float = 0.0
    # Of the CTC head on transcriptions; in blanks, the blank is the likeliest class.
    ctc_targets: float = 0.0
    ctc_loss: float = 0.0
    ctc_frames: float = 0.0
    ctc_blanks: float = 0.0
    # Of the transducer on transcriptions. No frames with durations, where a label may also advance
    # the frame; labels are those that a greedy search emits in these frames.
    transducer_targets: float = 0.0
    transducer_loss: float = 0.0
    transducer_frames: float = 0.0
    labels: float = 0.0
    # Of transcriptions.
    tokens: float = 0.0
    frames: float = 0.0

    def __add__(self, other: "ProbeSums") -> "ProbeSums":
        names = [field.name for field in fields(ProbeSums)]
        return ProbeSums(*(getattr(self, name) + getattr(other, name) for name in names))

    cross_entropy = _ratio("own", "targets")
    own_audio = _ratio("paired_own", "paired_targets")
    other_audio = _ratio("paired_other", "paired_targets")
    ctc = _ratio("ctc_loss", "ctc_targets")
    transducer = _ratio("transducer_loss", "transducer_targets")
    ctc_blank_share = _ratio("ctc_blanks", "ctc_frames")
    # Each frame ends with one blank.
    transducer_blank_share = _ratio("transducer_frames", "transducer_frames", "labels")

    @property
    def loss(self) -> float | None:
        """That of the decoder, without one that of the transducer, or else that of CTC."""
        losses = (self.cross_entropy, self.transducer, self.ctc)
        return next((loss for loss in losses if loss is not None), None)

    def summary(self) -> dict[str, float]:
        """Return the fields of validation.jsonl that are not None."""
        local, other = self.own_audio, self.other_audio
        row = {
            "cross_entropy": self.cross_entropy,
            "cross_entropy_other_audio": other,
            "audio_gain": None if local is None or other is None else other - local,
            "ctc": self.ctc,
            "transducer": self.transducer,
            "ctc_blank_share": self.ctc_blank_share,
            "transducer_blank_share": self.transducer_blank_share,
        }
        return {name: value for name, value in row.items() if value is not None}


class Probe:
    """Computes `ProbeSums` of a fixed set of utterances.

    The utterances are evenly spaced over the cuts and packed into batches. Those that cannot be
    read or are too long for the model are left out. The cuts are sorted by duration, so that the
    other audio differs in content and hardly in length.
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
        chosen = min(count, len(cuts))
        self._cuts = [cuts[index * len(cuts) // chosen] for index in range(chosen)]
        self._model, self._tokenizer = model, tokenizer
        self._budget, self._precision = frame_budget, precision
        # The first call reads the audio, and keeps it.
        self._batches: list[Batch] | None = None

    @torch.no_grad()
    def __call__(self) -> ProbeSums:
        if self._batches is None:
            self._batches = list(self._collated())
        device, sums = next(self._model.parameters()).device, ProbeSums()
        half = self._precision == "bfloat16"
        with evaluating(self._model), torch.autocast(device.type, torch.bfloat16, enabled=half):
            for batch in self._batches:
                sums += self._measure(batch.to(device))
        return sums

    def _collated(self) -> Iterator[Batch]:
        examples = [x for cut in self._cuts if (x := self._example(cut)) is not None]
        tokenizer, framing = self._tokenizer, self._model.config.features.framing
        for group in groups_within(examples, self._budget, framing):
            yield collate(group, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id, framing=framing)

    def _example(self, cut: Cut) -> Example | None:
        """Return the utterance, or None if it cannot be read or is too long for the model."""
        config = self._model.config
        texts = [supervision.text for supervision in cut.supervisions]
        if len(texts) != 1 or not texts[0]:
            return None
        experts = config.numbering()
        try:
            prompt = prompt_of(cut)
            expert = None if experts is None else experts.number_of(prompt)
            prompt_tokens = self._tokenizer.prompt(prompt)
            text = self._tokenizer.encode(texts[0], prompt.target)
            audio = load_audio(cut, config.features.sample_rate)
        except (AudioError, ValueError):
            # The evaluation of the same set reports the error.
            return None
        frames = config.features.framing.frames(len(audio))
        max_frames = config.encoder.max_frames
        max_positions = None if config.decoder is None else config.decoder.max_positions
        if not frames or (max_frames is not None and frames > max_frames):
            return None
        if max_positions is not None and len(prompt_tokens) + len(text) > max_positions:
            return None
        return Example(cut.id, audio, prompt_tokens, text, prompt.monotonic, expert=expert)

    def _measure(self, batch: Batch) -> ProbeSums:
        model = self._model
        # This bypasses hooks and a compiled forward, because these batches have other shapes.
        losses = model.forward(batch)
        encoded = model.encode(batch)
        aligned = [index for index, yes in enumerate(batch.monotonic.tolist()) if yes]
        targets, sequences = float(batch.num_monotonic_targets), encoded.unpack()
        frames = float(sum(batch.frame_lengths[index] for index in aligned))
        sums = ProbeSums(tokens=float(batch.text.layout.total), frames=frames)
        if model.decoder is not None:
            sums += ProbeSums(targets=float(batch.num_targets), own=float(losses.cross_entropy))
            if len(sequences) > 1:
                others = pack([*sequences[1:], sequences[0]])
                rotated = EncoderOutput(others.values, others.layout, batch.expert)
                sums += ProbeSums(
                    paired_targets=float(batch.num_targets),
                    paired_own=float(losses.cross_entropy),
                    paired_other=float(self._cross_entropy(batch, rotated)),
                )
        if not aligned:
            return sums
        spoken = pack([sequences[index] for index in aligned])
        if model.ctc_head is not None:
            best = model.ctc_logits(spoken.values).argmax(-1)
            sums += ProbeSums(
                ctc_targets=targets,
                ctc_loss=float(losses.ctc),
                ctc_frames=frames,
                ctc_blanks=float((best == model.vocab_size).sum()),
            )
        if model.transducer is not None:
            # Imported here, as training need not wait for all searches.
            from effasr.decoding.transducer_greedy import transducer_greedy

            sums += ProbeSums(transducer_targets=targets, transducer_loss=float(losses.transducer))
            if model.transducer.config.durations is None:
                labels = transducer_greedy(model.transducer, spoken, _MAX_SYMBOLS)
                sums += ProbeSums(transducer_frames=frames, labels=float(sum(map(len, labels))))
        return sums

    def _cross_entropy(self, batch: Batch, encoded: PackedSequence) -> Tensor:
        """Return the summed cross-entropy of the batch with ``encoded``: float32 ()."""
        decoder = self._model.decoder
        assert decoder is not None
        hidden, _ = self._model.decode(batch.tokens, encoded)
        return linear_cross_entropy(
            hidden, decoder.output_weight, batch.targets, bias=decoder.output_bias
        ).sum()


def groups_within(
    examples: Iterable[Example], frame_budget: int, framing: Framing
) -> Iterator[list[Example]]:
    """Yield successive examples together, up to the frame budget, or one alone."""
    group: list[Example] = []
    total = 0
    for example in examples:
        frames = framing.frames(len(example.audio))
        if group and total + frames > frame_budget:
            yield group
            group, total = [], 0
        group.append(example)
        total += frames
    if group:
        yield group
