"""The request for an utterance: languages, task and punctuation."""

import logging
from dataclasses import dataclass
from typing import Literal, get_args

from effasr.checks import check
from effasr.data.languages import AUTO, language_code

_log = logging.getLogger(__name__)

Task = Literal["transcribe", "translate"]
_TASKS = get_args(Task)

WITHOUT_SPACES = frozenset({"zh", "yue", "ja", "th", "lo", "km", "my", "bo"})
"""Languages which are written without spaces between words."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: which language is spoken, and what to write down."""

    source: str = "en"  # language of the speech; other names than codes become codes
    target: str = "en"  # language of the text
    task: Task = "transcribe"  # transcribe: the text follows the speech word by word
    punctuation: bool = True  # and capitals

    def __post_init__(self) -> None:
        for name in ("source", "target"):
            object.__setattr__(self, name, language_code(getattr(self, name)))
        check(self.task in _TASKS, "task", f"be one of {', '.join(_TASKS)}", repr(self.task))
        if self.task == "transcribe" and self.source != self.target:
            raise ValueError(
                f"`target` must be {self.source!r}, the language spoken, for the task "
                f"'transcribe', but is {self.target!r}: use the task 'translate'."
            )
        if self.task == "translate" and self.source == self.target:
            raise ValueError(
                f"`target` must differ from `source` for the task 'translate', but both are "
                f"{self.source!r}: use the task 'transcribe'."
            )

    def stating(
        self,
        source: str | None = None,
        target: str | None = None,
        task: Task | None = None,
        punctuation: bool | None = None,
    ) -> "Prompt":
        """Return the request of an utterance that states these; what it does not is as here."""
        source = source or self.source
        if not target:
            translates = self.task == "translate" and task != "transcribe"
            target = self.target if translates else source
        if task is None:
            task = "transcribe" if source == target else "translate"
        if punctuation is None:
            punctuation = self.punctuation
        return Prompt(source, target, task, punctuation)

    @property
    def monotonic(self) -> bool:
        """Whether the text follows the speech in order, so that CTC applies."""
        return self.task == "transcribe"


def warn_assumed(assumed: int, total: int, language: str, remedy: str) -> None:
    """Warn about utterances whose lines name no language, for a model that is told the language."""
    if assumed and language != AUTO:
        _log.warning(
            "%d of %d utterances name no language, and are prompted as %r: name `lang` in their "
            "lines, or %s.",
            *(assumed, total, language, remedy),
        )
