"""``effasr demo-data``: synthesises a small speech corpus."""

import argparse

from effasr.cli.options import AddCommand, at_least, folder, print_line
from effasr.cli.progress import progress_counter, working


def add(command: AddCommand) -> None:
    parser = command(
        "demo-data",
        run,
        "Synthesise a small speech corpus, without any download.",
        example="effasr demo-data data/demo",
    )
    parser.add_argument(
        "out", type=folder, metavar="OUT", help="folder for recordings and manifests"
    )
    parser.add_argument(
        "--multilingual",
        action="store_true",
        help="speech in English and German, and German with English texts",
    )
    parser.add_argument(
        "--conversations",
        action="store_true",
        help="also write conversations about the recordings and their texts, and the folder of a "
        "small chat model, for speech_llm_demo",
    )
    parser.add_argument(
        "--utterances",
        type=at_least(8),
        default=4000,
        metavar="N",
        help="recordings to train on (default: 4000)",
    )


def run(options: argparse.Namespace) -> int:
    from effasr.data.demo.corpus import build

    with progress_counter("recordings") as show:
        corpus = build(
            options.out,
            multilingual=options.multilingual,
            utterances=options.utterances,
            progress=show,
        )
    for name, split in corpus.statistics.items():
        print_line(
            f"{name:6} {split.rows:6} utterances {split.hours:6.2f} h  {split.voices:4} voices  "
            f"{split.shortest_s:.1f} to {split.longest_s:.1f} s, median {split.median_s:.1f} s"
        )
    if options.conversations:
        from effasr.data.demo.chat_model import write_conversations

        with working("writing conversations"):
            files = write_conversations(corpus.root)
        print_line(f"conversations: {files.speech}, {files.text}; chat model: {files.model}")
    return 0
