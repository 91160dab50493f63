"""Language models with an encoder and a decoder, such as T5, behind a speech encoder.

Relative positions of T5 are added to the scores of attention, by buckets, which packed attention
cannot do: inside the language model, and there alone, conversations are padded batches.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from effasr.checks import check
from effasr.data.conversation.batch import ConversationBatch
from effasr.model.language_model.architecture import is_encoder_decoder
from effasr.model.language_model.config import LanguageModelConfig
from effasr.model.language_model.model import LanguageModel
from effasr_kernels import PackedLayout


def build_language_model(config: LanguageModelConfig, encoder_width: int) -> LanguageModel:
    if config.architecture is not None and is_encoder_decoder(config.architecture):
        return EncoderDecoder(config, encoder_width)
    is_default = config.speech_input == "encoder"
    rule = "be encoder for a causal language model, which has no cross-attention"
    check(is_default, "language_model.speech_input", rule, config.speech_input)
    return LanguageModel(config, encoder_width)


class EncoderDecoder(LanguageModel):
    """Rows of a conversation before its answer are read by the encoder, the others are written.

    Speech among them passes the encoder, or the decoder's cross-attention alone.
    """

    loader, stacks = "AutoModelForSeq2SeqLM", 2

    def __init__(self, config: LanguageModelConfig, encoder_width: int) -> None:
        super().__init__(config, encoder_width)
        for stack in (self.model.encoder, self.model.decoder):
            # Second names of the shared embedding, whose rows are the input here.
            stack.embed_tokens = None
        is_scaled = getattr(self.model.config, "scale_decoder_outputs", False)
        self._scale = self.model.config.d_model**-0.5 if is_scaled else 1.0

    def forward(
        self, x: Tensor, layout: PackedLayout, batch: ConversationBatch | None = None
    ) -> Tensor:
        if batch is None:
            raise ValueError("`batch` must be given for an encoder-decoder model, but is None.")
        if not batch.ids:
            return x
        rows = self.read(x, batch)
        _, sources, targets = _tables(batch, x.device, read_speech=True)
        hidden = self.write(rows[targets], rows[sources], sources < len(x))
        return rows.index_put((targets,), hidden.to(rows.dtype))[:-1]

    def read(self, x: Tensor, batch: ConversationBatch) -> Tensor:
        """Rows (U + 1, width) with the encoder's output in place of those that it reads."""
        rows = torch.cat([x, x.new_zeros(1, x.shape[1])])
        read_speech = self.config.speech_input == "encoder"
        inputs, _, _ = _tables(batch, x.device, read_speech=read_speech)
        outputs = self.model.encoder(
            inputs_embeds=rows[inputs], attention_mask=_mask(inputs < len(x))
        ).last_hidden_state
        # Padding goes to the last row.
        return rows.index_put((inputs,), outputs.to(rows.dtype))

    def write(self, x: Tensor, memory: Tensor, is_row: Tensor, **cache: Any) -> Tensor:
        """Hidden states (N, u, width) of the decoder."""
        # x: (N, u, width); memory: (N, t, width), padded where is_row, bool (N, t), is false
        outputs = self.model.decoder(
            inputs_embeds=x,
            encoder_hidden_states=memory,
            encoder_attention_mask=_mask(is_row),
            **({"use_cache": False} | cache),
        )
        return outputs.last_hidden_state * self._scale

    def check_against_transformers(self) -> None:
        """Check nothing: attention is transformers' own, and tests compare each family."""


def _mask(is_row: Tensor) -> Tensor:
    # Of four dimensions, so that transformers does not ask the device whether all are rows.
    return is_row[:, None, None]


def _tables(
    batch: ConversationBatch, device: torch.device, *, read_speech: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that the encoder reads, those of sources and those of answers, int64 (N, longest) each.

    Beyond the end of a conversation they are U, the number of rows of the batch.
    """
    stack, speech = batch.stacks.shape[1], set[int]()
    if not read_speech:
        for start, frames in zip(batch.clip_starts, batch.clip_frames.lengths, strict=False):
            speech.update(range(start, start + -(-frames // stack)))
    begins = list(accumulate(batch.token_lengths, initial=0))
    spans = list(zip(begins[:-1], batch.source_lengths, begins[1:], strict=True))
    sources = [range(begin, begin + length) for begin, length, _ in spans]
    answers = [range(begin + length, end) for begin, length, end in spans]
    read = [[row for row in rows if row not in speech] for rows in sources]
    rows = batch.tokens.values.shape[0]
    read_rows, source_rows, answer_rows = (
        _table(part, rows).to(device, non_blocking=True) for part in (read, sources, answers)
    )
    return read_rows, source_rows, answer_rows


def _table(parts: Iterable[Sequence[int]], fill: int) -> Tensor:
    rows = [torch.tensor(part, dtype=torch.int64, device="cpu") for part in parts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
