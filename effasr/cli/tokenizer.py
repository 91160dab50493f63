"""``effasr tokenizer``: trains a tokenizer on the texts of manifests."""

from __future__ import annotations

import argparse
from pathlib import Path

from effasr.cli.options import AddCommand, add_language, at_least, folder, print_line


def add(command: AddCommand) -> None:
    """Add the command to the parser."""
    parser = command(
        "tokenizer", run, "Train a tokenizer: one SentencePiece model for each language."
    )
    parser.add_argument(
        "manifests", type=Path, nargs="+", metavar="MANIFEST", help="whose texts to learn from"
    )
    parser.add_argument("out", type=folder, metavar="OUT", help="folder for the tokenizer")
    add_language(parser)
    parser.add_argument(
        "--vocab-size",
        type=at_least(1),
        default=1024,
        metavar="N",
        help="pieces of each language (default: 1024)",
    )
    parser.add_argument(
        "--model-type", choices=("unigram", "bpe"), default="bpe", help="default: bpe"
    )


def run(options: argparse.Namespace) -> int:
    """Collect the texts of each language and train."""
    from effasr.data.manifest.pairs import is_text_only, pairs
    from effasr.data.manifest.reader import iterate, request
    from effasr.data.tokenizer import train_tokenizer

    texts: dict[str, list[str]] = {}
    spoken = set()
    for manifest in options.manifests:
        if is_text_only(manifest):
            for pair in pairs(manifest):
                texts.setdefault(pair.prompt.source, []).append(pair.source)
                texts.setdefault(pair.prompt.target, []).append(pair.text)
            continue
        for cut in iterate(manifest, language=options.language):
            wanted = request(cut)
            spoken.add(wanted.source)
            texts.setdefault(wanted.target, []).append(cut.supervisions[0].text or "")
    if not texts:
        raise ValueError(f"{', '.join(map(str, options.manifests))}: no utterances to learn from.")
    tokenizer = train_tokenizer(
        texts,
        options.out,
        vocab_size=options.vocab_size,
        model_type=options.model_type,
        sources=sorted(spoken - texts.keys()),
    )
    print_line(f"{options.out}: {tokenizer.vocab_size} tokens for {', '.join(sorted(texts))}")
    return 0
