"""Formats corpus counts for users, and a warning where CTC will be hard to train."""

from collections.abc import Callable, Iterator

from effasr.data.features.frame_geometry import Framing
from effasr.data.statistics.survey import FramesPerToken, Survey, least_median
from effasr.data.statistics.vocabulary import VocabularyChoice, choose_vocabulary
from effasr.untrusted import display

COLUMNS = 100  # width of a printed line


def describe_counts(survey: Survey) -> str:
    hours = f"{survey.hours:,.2f} h"
    if len(survey.languages) > 1:
        shares = (
            f"{language} {counts.hours:,.2f}" for language, counts in survey.languages.items()
        )
        listed = ", ".join(shares)
        hours += f" ({listed if len(listed) < 40 else f'{len(survey.languages)} languages'})"
    letters = describe_letters(survey.characters, len(survey.speakers))
    return ", ".join(filter(None, [f"{survey.utterances:,} utterances", hours, letters]))


def describe_letters(characters: int, speakers: int) -> str:
    parts = [f"{characters:,} characters"] if characters else []
    parts += [f"{speakers:,} speaker{'s' * (speakers != 1)}"] if speakers else []
    return ", ".join(parts)


def describe_alignment(ratios: FramesPerToken, framing: Framing) -> str:
    return (
        f"frames per token ({framing.subsampling}x): median {ratios.median:.1f}, under 2 in "
        f"{percent(ratios.under_two)} %, too few for CTC in {percent(ratios.impossible)} % of "
        "utterances"
    )


def percent(share: float) -> str:
    """Return a share in percent; a value that is not 0 is never shown as 0."""
    value = 100 * share
    return "under 0.1" if 0 < value < 0.05 else f"{value:.1f}" if 0 < value < 10 else f"{value:.0f}"


def warn_about_alignment(
    ratios: FramesPerToken,
    framing: Framing,
    *,
    with_subsampling: Callable[[int], FramesPerToken | None],
    survey: Callable[[], Survey] | None = None,
) -> list[str]:
    """Return a folded warning with remedies if CTC has few frames per token; else no lines.

    ``with_subsampling`` returns frames per token of the same vocabulary at another subsampling.
    ``survey`` reads texts for choosing a larger vocabulary, and is called only for a warning; None
    if the vocabulary is that of a trained model.
    """
    if not ratios.is_hard(framing):
        return []
    remedies = list(_remedies(framing, with_subsampling, None if survey is None else survey()))
    cause = (
        f"CTC learns late or not at all with so few frames per token; a median of "
        f"{least_median(framing.subsampling):g} or more is enough."
    )
    remedy = (
        f"Remedy: {', or '.join(remedies)}."
        if remedies
        else "No usual vocabulary changes that for this corpus: leave model.ctc false."
    )
    return fold(f"warning: {cause} {remedy}")


def fold(text: str) -> list[str]:
    """Return lines that fit on the terminal, of at most `COLUMNS` columns."""
    return display.fold(text, min(COLUMNS, display.display_width() or COLUMNS))


def choice_options(choice: VocabularyChoice) -> str:
    """Return the options of `effasr tokenizer` that train vocabularies of these sizes."""
    sizes = set(choice.sizes.values())
    return f"--vocab-size {sizes.pop()}" if len(sizes) == 1 else "--vocab-size auto"


def _remedies(
    framing: Framing,
    with_subsampling: Callable[[int], FramesPerToken | None],
    survey: Survey | None,
) -> Iterator[str]:
    """Return changes that give enough frames per token, the smallest change first."""
    finer = framing.subsampling > 4
    four = Framing(subsampling=4)
    alone = with_subsampling(4) if finer else None
    if alone is not None and not alone.is_hard(four):
        yield f"model.encoder.subsampling=4 (median {alone.median:.1f})"
    if survey is None or not survey.languages:
        return
    larger = choose_vocabulary(survey, subsampling=framing.subsampling)
    if not larger.is_hard and larger.frames_per_token is not None:
        yield _vocabulary(larger)
    elif finer and (alone is None or alone.is_hard(four)):
        both = choose_vocabulary(survey, subsampling=4)
        if not both.is_hard and both.frames_per_token is not None:
            yield f"model.encoder.subsampling=4 with {_vocabulary(both)}"


def _vocabulary(choice: VocabularyChoice) -> str:
    assert choice.frames_per_token is not None
    return (
        f"a tokenizer with {choice_options(choice)} (median {choice.frames_per_token.median:.1f})"
    )
