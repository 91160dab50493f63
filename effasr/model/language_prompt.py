"""Which language is spoken, told to the encoder output of a model of several languages."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from effasr.checks import check, check_positive
from effasr.data.languages import language_among
from effasr.data.prompt import Prompt
from effasr.nn.experts import EncoderOutput
from effasr.nn.linear import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguagePromptConfig:
    """Tells the language of an utterance to the encoder output, as in Nemotron 3.5 ASR.

    Attributes:
        languages: The number of each language by its name; several names may have one number.
        count: Numbers, some of which no language may have.
        width: Channels between its two linear layers.
    """

    languages: dict[str, int]
    count: int = 128
    width: int = 2048

    def __post_init__(self) -> None:
        check_positive(self, "count", "width")
        numbers = self.languages.values()
        rule = f"have numbers from 0 to count - 1 = {self.count - 1}"
        known = bool(numbers) and all(0 <= number < self.count for number in numbers)
        check(known, "languages", rule, self.languages)

    def number_of(self, prompt: Prompt) -> int:
        """The number of the prompt for an utterance, see `effasr.data.batch.Batch.expert`."""
        return self.languages[language_among(prompt.source, self.languages, "speech")]


class LanguagePrompt(nn.Module):
    """Two linear layers over each frame and the number of the language in unary."""

    def __init__(self, config: LanguagePromptConfig, width: int):
        super().__init__()
        self.count = config.count
        self.linear1 = Linear(width + self.count, config.width)
        self.linear2 = Linear(config.width, width)

    def forward(self, encoded: EncoderOutput) -> EncoderOutput:
        if encoded.expert is None:
            raise ValueError(
                "`expert` must be the number of each utterance's language for a model with a "
                "`language_prompt`, but is None: see `LanguagePromptConfig.number_of`."
            )
        number = F.pad(encoded.expert, (0, 1))[encoded.layout.sequence_ids()]
        return encoded.with_values(self.tell(encoded.values, number))

    def tell(self, values: Tensor, number: Tensor) -> Tensor:
        """Tell frames, (..., width), the numbers of their languages, int64 (...)."""
        unary = F.one_hot(number, self.count).to(values.dtype)
        return self.linear2(self.linear1(torch.cat([values, unary], -1)).relu())
