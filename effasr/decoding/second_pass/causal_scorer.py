"""Log-probabilities of texts by a causal language model of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from effasr.data.features.segments import segment_sum
from effasr.data.tokenizer.hugging_face import is_tokenizer_error
from effasr.interop.huggingface.language_model import read_language_model
from effasr.model.language_model.architecture import (
    import_transformers,
    max_rows,
    read_architecture,
)
from effasr.model.language_model.config import LanguageModelConfig
from effasr.model.language_model.model import LanguageModel
from effasr.untrusted.files import DOCUMENT_BYTES, open_regular
from effasr_kernels import PackedLayout, linear_cross_entropy

_UNSCORED = -100

# Files that tokenizers of transformers are read from.
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".tiktoken", ".txt")

Text = tuple[str, str]  # what was said before, perhaps nothing, and the text to score


class CausalScorer:
    """A causal language model of a folder of transformers; code in it is never run."""

    def __init__(
        self,
        directory: str | Path,
        device: torch.device | str = "cpu",
        row_budget: int = 8192,  # of a packed forward; a longer text has its own
    ) -> None:
        architecture = read_architecture(directory, causal=True)
        # Text alone: the adapter from speech is as small as can be, and unused.
        config = LanguageModelConfig(architecture=architecture, stack=1, adapter="linear")
        model = LanguageModel(config, encoder_width=1)
        read_language_model(directory, model)
        self.model = model.eval().to(device)
        self.model.check_against_transformers()
        self._tokenizer = _load_tokenizer(directory)
        self._start = _start_id(self._tokenizer, directory)
        self._check_ids([self._start])
        self._most = max_rows(architecture)
        self._budget = row_budget
        self._device = torch.device(device)

    def token_ids(self, text: Text) -> tuple[list[int], int]:
        """Return the ids that the model reads, and how many at the end are scored.

        The start token is first; the beginning of what was said before is left out if the model has
        no position for it.
        """
        before, scored_text = (part.strip() for part in text)
        scored = self._encoded(f" {scored_text}" if before and scored_text else scored_text)
        if self._most is not None and len(scored) + 1 > self._most:
            raise ValueError(
                f"`second_lm` must have room for a segment of {len(scored)} tokens and the start, "
                f"but has {self._most} positions: lower `chunk_seconds`, or choose another model."
            )
        context = self._encoded(before)
        if self._most is not None:
            context = context[max(0, len(context) + len(scored) + 1 - self._most) :]
        return [self._start, *context, *scored], len(scored)

    @torch.no_grad()
    def log_probs(self, texts: Sequence[Text]) -> list[float]:
        """Return the log-probability of each text after what was said before it, in nats.

        All texts are read in one packed forward, or in several of at most ``row_budget`` rows. The
        end of a text is not scored, as speech may go on in the next segment. The result of a text
        does not depend on the others, up to rounding.
        """
        rows = [self.token_ids(text) for text in texts]
        scores: list[float] = []
        batch: list[tuple[list[int], int]] = []
        used = 0
        for row in rows:
            if batch and used + len(row[0]) > self._budget:
                scores += self._forward(batch)
                batch, used = [], 0
            batch.append(row)
            used += len(row[0])
        return scores + (self._forward(batch) if batch else [])

    def _forward(self, rows: Sequence[tuple[list[int], int]]) -> list[float]:
        # The last token of a sequence predicts nothing that is scored, but keeps it from being
        # empty.
        layout = PackedLayout.from_lengths([len(ids) for ids, _ in rows], self._device)
        flat = [token for ids, _ in rows for token in ids]
        targets: list[int] = []
        for ids, scored in rows:
            skipped = len(ids) - 1 - scored
            targets += [*[_UNSCORED] * skipped, *ids[skipped + 1 :], _UNSCORED]
        losses = linear_cross_entropy(
            self.model(self.model.embed_tokens(self._tensor(flat)), layout),
            self.model.output_weight,
            self._tensor(targets),
            bias=self.model.output_bias,
            ignore_index=_UNSCORED,
        )
        return (-segment_sum(losses.double(), layout)).tolist()

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._device)

    def _encoded(self, text: str) -> list[int]:
        try:
            ids = list(self._tokenizer.encode(text, add_special_tokens=False)) if text else []
        except BaseException as error:
            if not is_tokenizer_error(error):
                raise
            problem = " ".join(str(error).split())[:200]
            raise ValueError(f"`second_lm`: its tokenizer cannot read a text: {problem}") from error
        self._check_ids(ids)
        return ids

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocab_size = self.model.output_weight.shape[0]
        if (largest := max(ids, default=0)) >= vocab_size:
            raise ValueError(
                f"`second_lm` must have a tokenizer of its model's {vocab_size} tokens, but it "
                f"gives the id {largest}: copy the folder again."
            )


def _load_tokenizer(directory: str | Path) -> Any:
    transformers = import_transformers()
    for path in sorted(Path(directory).iterdir()):
        # transformers and tokenizers open them by name, and read them whatever their size.
        if path.suffix in _TOKENIZER_SUFFIXES:
            open_regular(path, DOCUMENT_BYTES).close()
    try:
        return transformers.AutoTokenizer.from_pretrained(  # nosec B615
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:  # What a damaged tokenizer raises differs; tokenizers panics.
        if not is_tokenizer_error(error):
            raise
        problem = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`second_lm` {directory} must have a tokenizer of transformers, but has none that "
            f"loads: {problem}"
        ) from None


def _start_id(tokenizer: Any, directory: str | Path) -> int:
    """Return the token before a text: the beginning of text, or the end of the one before."""
    for name in ("bos_token_id", "eos_token_id"):
        if (token := getattr(tokenizer, name, None)) is not None:
            return int(token)
    raise ValueError(
        f"`second_lm` {directory} must have a tokenizer with a `bos_token` or an `eos_token`, from "
        "which a text starts, but it has neither."
    )
