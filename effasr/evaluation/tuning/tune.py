"""Decoding of a dev set with n-best lists, and the weights that choose best among them."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from lhotse.cut import Cut
from rich import box
from rich.table import Table

from effasr.checks import check
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.evaluation.bootstrap import Counts, interval, probability_of_improvement, rate
from effasr.evaluation.evaluate import transcribe_cuts
from effasr.evaluation.normalizer import get_normalizer
from effasr.evaluation.tables import to_text
from effasr.evaluation.translation import count_ngrams
from effasr.evaluation.tuning.weights import GRIDS, NBestLists, Weights, best_weights, tunable
from effasr.evaluation.wer import count_errors
from effasr.model.asr import ASRModel
from effasr.transcription.recognizer import Recognizer
from effasr.transcription.results import Failure, Result


@dataclass(frozen=True, slots=True)
class Tuning:
    """Weights before and after, and the errors of both on the lists of the set."""

    names: tuple[str, ...]
    start: Weights  # of the configuration
    tuned: Weights  # the chosen ones, or the same
    before: tuple[Counts, ...]  # errors of each utterance with the given weights
    after: tuple[Counts, ...]  # errors of each with the tuned ones
    oracle: tuple[Counts, ...]  # errors of each, if the best alternative were chosen
    size: int  # alternatives of the longest list
    config: DecodingConfig  # the configuration with the tuned weights, without lists
    failures: tuple[Failure, ...]  # recordings that were not transcribed; they count in no rate

    @property
    def changed(self) -> bool:
        return self.tuned != self.start

    def report(self) -> str:
        metric = self.before[0].metric
        table = Table(box=box.MARKDOWN)
        for column in ("weights", *self.names, f"{metric.label}{metric.unit}", "95 %"):
            table.add_column(column, justify="left" if column == "weights" else "right")
        for name, weights, errors in (
            ("given", self.start, self.before),
            ("tuned", self.tuned, self.after),
        ):
            low, high = interval(errors)
            table.add_row(
                name,
                *(f"{getattr(weights, weight):g}" for weight in self.names),
                *(metric.figure(rate(errors)), f"{metric.figure(low)} - {metric.figure(high)}"),
            )
        lines = [to_text(table)]
        if self.changed:
            better = 100 * probability_of_improvement(self.before, self.after)
            lines.append(f"better in {better:.0f} of 100 draws of the utterances")
        else:
            lines.append(
                "nothing was changed: the best weights gain no more than the best of as many may "
                "by chance"
            )
        oracle = metric.text(rate(self.oracle))
        lines.append(f"{metric.label} of the best of {self.size} alternatives (oracle): {oracle}")
        if self.failures:
            lines.append(f"{len(self.failures)} utterances failed and are not counted")
        return "\n".join(lines) + "\n"

    def comment(self, set_name: str) -> str:
        metric = self.before[0].metric
        return (
            f"effasr tune on {set_name}: {len(self.after)} utterances, {metric.label} of the "
            f"choice among {self.size} alternatives {metric.figure(rate(self.before))} -> "
            f"{metric.text(rate(self.after))}"
        )


def tune(
    model: ASRModel,
    tokenizer: Tokenizer,
    cuts: Iterable[Cut],
    config: DecodingConfig,
    *,
    normalizer: str = "basic",
    failures: Sequence[Failure] = (),
    on_result: Callable[[Result], None] | None = None,
    on_trial: Callable[[], None] | None = None,
) -> Tuning:
    """Choose the weights of a configuration with the fewest errors on a dev set.

    The set is decoded once, with lists of ``config.beam`` alternatives, or ``config.nbest``; each
    alternative is scored by every part of the model and by the language models. Weights are then
    compared by the alternatives that they choose. For the weights of a second pass that is what
    decoding does, except that its context is of the texts that the given weights choose. For those
    of the search it is an approximation: a search with them may find other alternatives.
    """
    get_normalizer(normalizer)  # an unknown name is the caller's error
    listed = replace(config, nbest=config.nbest or config.beam, score_parts=True)
    recognizer = Recognizer(model, tokenizer, listed)
    names = tunable(model, config, recognizer.method)
    failed, utterances, judges, tasks = [*failures], [], [], set()
    for reference, prompt, result in transcribe_cuts(recognizer, cuts, on_result):
        if isinstance(result, Failure):
            failed.append(result)
        else:
            utterances.append((reference, result))
            judges.append(_judge(prompt, normalizer))
            tasks.add(prompt.task)
    rule = "have transcriptions alone or translations alone, which WER or BLEU judges"
    check(len(tasks) < 2, "cuts", rule, "of both tasks", "tune on a manifest of each")
    start = Weights.from_config(config, recognizer.method)
    lists = NBestLists(utterances, config, start, judges)
    before = lists.errors(start)
    if not before or math.isnan(rate(before)):
        first = f"; the first failed: {failed[0].reason}" if failed else ""
        raise ValueError(
            "the set must have a transcribed utterance whose reference has a word, but has none "
            f"among {len(utterances)}, and {len(failed)} failed{first}"
        )
    tuned = best_weights(lists, start, {name: GRIDS[name] for name in names}, on_trial)
    values = {name: getattr(tuned, name) for name in names}
    changed = {name: x for name, x in values.items() if x != getattr(start, name)}
    return Tuning(
        names=names,
        start=start,
        tuned=tuned,
        before=before,
        after=lists.errors(tuned),
        oracle=lists.oracle(),
        size=lists.size,
        config=replace(config, nbest=_least(config), **changed),
        failures=tuple(failed),
    )


def _judge(prompt: Prompt, normalizer: str) -> Callable[[str, str], Counts]:
    """Return what counts errors: of words, or of a translation 100 minus BLEU of the sentence."""
    if prompt.task == "translate":
        return lambda reference, text: count_ngrams(reference, text, prompt.target)
    normalize = get_normalizer(normalizer, prompt.target)
    return lambda reference, text: count_errors(normalize(reference), normalize(text))


def _least(config: DecodingConfig) -> int | None:
    """Return the lists that a configuration needs: those of a second pass."""
    return None if config.second_lm is None else config.nbest or config.beam
