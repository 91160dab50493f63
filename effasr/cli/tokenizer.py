"""``effasr tokenizer``: trains a tokenizer on the texts of manifests."""

import argparse
import itertools
from pathlib import Path
from typing import TYPE_CHECKING

from effasr.checks import check
from effasr.cli.options import (
    AddCommand,
    add_language,
    add_subsampling,
    at_least,
    folder,
    fraction,
    print_folded,
    print_line,
    print_next,
)
from effasr.cli.progress import progress_counter, working

if TYPE_CHECKING:
    from effasr.data.statistics.survey import Survey
    from effasr.data.tokenizer import Tokenizer

_SHARED_SIZE = 1024
_CHECKED_TEXTS = 10_000  # of each language, evenly spaced


def add(command: AddCommand) -> None:
    parser = command(
        "tokenizer",
        run,
        "Train a SentencePiece tokenizer, for each language or for all.",
        example="effasr tokenizer data/train data/tokenizer --subsampling 4",
    )
    parser.add_argument(
        "manifests",
        type=Path,
        nargs="+",
        metavar="MANIFEST",
        help="manifests whose texts the tokenizer is trained on",
    )
    parser.add_argument("out", type=folder, metavar="OUT", help="folder for the tokenizer")
    add_language(parser, default="en")
    parser.add_argument(
        "--vocab-size",
        type=lambda text: text if text == "auto" else at_least(1)(text),
        metavar="N",
        help="pieces of each language, or of the shared model; auto, the default, chooses them by "
        f"the hours and frames per token of each language ({_SHARED_SIZE} with --shared)",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="one model for all languages, for little speech in similar languages",
    )
    add_subsampling(parser)
    parser.add_argument(
        "--model-type",
        choices=("unigram", "bpe"),
        default="bpe",
        help="algorithm of SentencePiece (default: bpe)",
    )
    parser.add_argument(
        "--normalization",
        choices=("identity", "nfc", "nfkc"),
        default="nfc",
        help="form of Unicode into which texts are brought (default: nfc)",
    )
    parser.add_argument(
        "--coverage",
        type=fraction,
        default=1.0,
        metavar="X",
        help="share of the characters that are in pieces (default: 1)",
    )
    parser.add_argument(
        "--extend",
        type=Path,
        metavar="MODEL",
        help="tokenizer, model directory or run to which the languages of the manifests are added; "
        "all that it has keeps its ids, and init_from with the new tokenizer its weights",
    )
    parser.add_argument(
        "--byte-fallback",
        action="store_true",
        help="256 pieces more, which spell characters that are in no piece",
    )


def run(options: argparse.Namespace) -> int:
    from effasr.data.manifest.cuts import prompt_of
    from effasr.data.manifest.pairs import is_text_only, pairs
    from effasr.data.manifest.reader import iterate
    from effasr.data.statistics.survey import Survey
    from effasr.data.statistics.vocabulary import choose_vocabulary
    from effasr.data.tokenizer import train_tokenizer
    from effasr.data.tokenizer.fidelity import TextFidelity

    texts: dict[str, list[str]] = {}
    spoken, survey = set(), Survey()
    count = itertools.count(1)
    with progress_counter("texts") as show:
        for manifest in options.manifests:
            if is_text_only(manifest):
                for pair in pairs(manifest):
                    show(next(count))
                    texts.setdefault(pair.prompt.source, []).append(pair.source)
                    texts.setdefault(pair.prompt.target, []).append(pair.text)
                    survey.add_text(pair.prompt.source, pair.source)
                    survey.add_text(pair.prompt.target, pair.text)
                continue
            for cut in iterate(manifest, language=options.language):
                show(next(count))
                prompt = prompt_of(cut)
                spoken.add(prompt.source)
                texts.setdefault(prompt.target, []).append(cut.supervisions[0].text or "")
                survey.add_cut(cut)
    if not texts:
        raise ValueError(f"{', '.join(map(str, options.manifests))}: no utterances to train on.")
    subsampling, kind = options.subsampling, options.model_type
    extend = None if options.extend is None else _tokenizer_of(options.extend)
    if extend is not None:
        rule = "be left out with --extend, which adds a model for each language"
        check(not options.shared, "--shared", rule, "given")
        subsampling = subsampling or extend.subsampling
    sizes, chosen = options.vocab_size or _SHARED_SIZE, options.vocab_size == "auto"
    if options.vocab_size is None:
        chosen = not options.shared
    if options.shared and chosen:
        raise ValueError(
            "`--vocab-size` must be a number with --shared, but is auto, which chooses one for "
            "each language."
        )
    with working("training the tokenizer", "vocabularies") as trained:
        if chosen:
            choice = choose_vocabulary(survey, subsampling=subsampling, model_type=kind)
            sizes, subsampling = choice.sizes, choice.subsampling
        tokenizer = train_tokenizer(
            texts,
            options.out,
            vocab_size=sizes,
            model_type=kind,
            normalization=options.normalization,
            coverage=options.coverage,
            byte_fallback=options.byte_fallback,
            sources=sorted(spoken - texts.keys()),
            shared=options.shared,
            subsampling=subsampling,
            extend=extend,
            progress=trained,
        )
    print_line(f"{options.out}: {tokenizer.vocab_size} tokens for {', '.join(tokenizer.languages)}")
    _report(survey, tokenizer, subsampling, chosen=chosen)
    fidelity = TextFidelity(tokenizer)
    for language, spoken_texts in texts.items():
        for text in spoken_texts[:: -(-len(spoken_texts) // _CHECKED_TEXTS)]:
            fidelity.add(text, language)
    for line in fidelity.lines():
        print_folded(line)
    train = [str(path) for path in options.manifests]
    print_next(["init", *train, "--tokenizer", str(options.out), "--dev", "DEV"])
    return 0


def _tokenizer_of(path: Path) -> "Tokenizer":
    """Read a tokenizer from its folder, or that of a model or a run."""
    from effasr import checkpoint
    from effasr.data.tokenizer import load_tokenizer

    is_model = (path / checkpoint.DESCRIPTION).is_file() or (path / "checkpoints").is_dir()
    return checkpoint.read_tokenizer(checkpoint.resolve(path)) if is_model else load_tokenizer(path)


def _report(
    survey: "Survey", tokenizer: "Tokenizer", subsampling: int | None, *, chosen: bool
) -> None:
    """Print what the corpus is like, and warn where CTC would be hard to train on it."""
    from effasr.data.features.frame_geometry import FASTCONFORMER, Framing
    from effasr.data.statistics.guidance import (
        describe_alignment,
        describe_counts,
        warn_about_alignment,
    )

    framing = FASTCONFORMER if subsampling is None else Framing(subsampling=subsampling)
    print_folded(describe_counts(survey))
    ratios = survey.sampled(tokenizer, framing)
    if ratios is None:
        return
    print_folded(describe_alignment(ratios, framing))
    if chosen and framing != FASTCONFORMER:
        print_folded(
            f"this vocabulary is for training with model.encoder.subsampling={framing.subsampling}"
        )
    warning = warn_about_alignment(
        ratios,
        framing,
        with_subsampling=lambda other: survey.sampled(tokenizer, Framing(subsampling=other)),
        survey=None if chosen else lambda: survey,
    )
    if warning:
        print_line("\n".join(warning))
