"""Configuration of the language model and of the adapter that feeds speech to it."""

from dataclasses import dataclass
from typing import Literal

from effasr.checks import check, check_choices, check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelConfig:
    """A language model of transformers, and the adapter from the encoder to it.

    It is causal, or has an encoder and a decoder of its own (T5, mT5, UMT5, BART).

    Attributes:
        path: Folder of the language model: ``config.json``, a tokenizer with a chat template, and
            weights as safetensors. Code in the folder is never run. It is read when a run begins;
            checkpoints do not need it.
        weights: ``pretrained`` reads the weights of the folder, ``random`` draws them by the seed
            of the run.
        architecture: The content of ``config.json``; by default that of ``path``, which a run
            fills in.
        stack: k, encoder frames that the adapter makes one row of the language model of.
        adapter: ``linear``: one layer. ``mlp``: two, with GELU between them.
        adapter_width: Channels between the layers of ``mlp``; by default those of the language
            model.
        speech_input: Part of an encoder-decoder model that reads the adapter's rows: ``encoder``,
            among embedded tokens, or ``decoder``, whose cross-attention reads them beside the
            encoder's output for the texts. A causal model has ``encoder``.
    """

    path: str = ""
    weights: Literal["pretrained", "random"] = "pretrained"
    architecture: str | None = None
    stack: int = 4
    adapter: Literal["linear", "mlp"] = "mlp"
    adapter_width: int | None = None
    speech_input: Literal["encoder", "decoder"] = "encoder"

    def __post_init__(self) -> None:
        check_positive(self, "stack")
        check_choices(self, adapter=("linear", "mlp"), weights=("pretrained", "random"))
        check_choices(self, speech_input=("encoder", "decoder"))
        if self.adapter_width is not None:
            check_positive(self, "adapter_width")
            check(
                self.adapter == "mlp",
                "adapter_width",
                "be null for the adapter 'linear'",
                self.adapter_width,
            )
        check(
            bool(self.path) or self.architecture is not None,
            "path",
            "name the folder of a language model",
            "empty",
        )
