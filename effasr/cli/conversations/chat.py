"""``effasr chat``: questions to a speech language model, about recordings or without."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import tee
from pathlib import Path
from typing import TYPE_CHECKING

from effasr.cli.options import (
    RUN_HELP,
    AddCommand,
    add_device,
    add_positional,
    at_least,
    print_line,
)
from effasr.cli.progress import progress_counter

if TYPE_CHECKING:
    from effasr.checkpoint import LoadedModel
    from effasr.data.conversation.messages import Conversation, Message


def add(command: AddCommand) -> None:
    parser = command(
        "chat",
        run,
        "Ask a speech language model, about recordings or without them.",
        "The recordings and the question are one turn of the user. Without a question, each line",
        "of standard input is one, and the model knows the turns before it. With --manifest, the",
        "last turn of the assistant in each conversation is answered anew: JSON lines with id,",
        "answer and reference.",
        example="effasr chat runs/mine 'Who calls, and why?' --audio call.wav",
    )
    add_positional(parser, "run", "RUN", RUN_HELP, required=True)
    text = "question to answer (default: lines of standard input)"
    add_positional(parser, "question", "QUESTION", text, kind=str, option=False)
    parser.add_argument(
        "--audio",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="a recording, before the question; may be given several times",
    )
    parser.add_argument("--system", metavar="TEXT", help="instructions before the first turn")
    parser.add_argument(
        "--manifest", type=Path, metavar="FILE", help="conversations, JSON lines with `messages`"
    )
    parser.add_argument(
        "--beam",
        type=at_least(1),
        default=1,
        metavar="N",
        help="hypotheses of each answer in beam search (default: 1, greedy)",
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least(1),
        default=256,
        metavar="N",
        help="longest answer, in tokens (default: 256)",
    )
    parser.add_argument(
        "--slots",
        type=at_least(1),
        default=16,
        metavar="N",
        help="conversations of --manifest that are answered together (default: 16)",
    )
    add_device(parser)


def run(options: argparse.Namespace) -> int:
    from effasr.checkpoint import load_best
    from effasr.distributed.process_group import choose_device

    if options.manifest is not None and (options.question or options.audio or options.system):
        raise ValueError(
            "`--manifest` must be given alone, because its conversations have instructions, "
            "questions and recordings of their own: leave out QUESTION, --audio and --system."
        )
    loaded = load_best(options.run, choose_device(options.device))
    if loaded.model.language_model is None:
        raise ValueError(
            f"{options.run} must have a language model to chat with, but has none: use `effasr "
            "transcribe`."
        )
    if options.manifest is not None:
        return _answer_manifest(options, loaded)
    for answer in _dialogue(options, loaded):
        print_line(answer)
        # For a program that asks through pipes, and waits for each answer.
        sys.stdout.flush()
    return 0


def _dialogue(options: argparse.Namespace, loaded: LoadedModel) -> Iterator[str]:
    """Yield the answer to the question, or to each line of standard input."""
    from effasr.data.conversation.messages import AudioPart, Message
    from effasr.transcription.answers import Responder

    responder = Responder(loaded, beam=options.beam, max_tokens=options.max_tokens)
    messages: list[Message] = []
    if options.system:
        messages.append(Message("system", (options.system,)))
    parts = tuple(AudioPart(str(path.absolute())) for path in options.audio)
    questions = sys.stdin if options.question is None else [options.question]
    for question in questions:
        if not question.strip():
            continue
        messages.append(Message("user", (*parts, question.strip())))
        result = responder.answer(messages)
        if result.text:
            messages.append(Message("assistant", (result.text,)))
            parts = ()
        else:
            # No conversation has an empty turn: the next question takes the place of this one.
            messages.pop()
        yield result.text


def _answer_manifest(options: argparse.Namespace, loaded: LoadedModel) -> int:
    """Print a JSON line for each conversation; 1 if one cannot be answered."""
    from effasr.data.conversation.messages import conversations
    from effasr.transcription.answers import Answer, Responder
    from effasr.transcription.json_files import json_line

    code = 0
    responder = Responder(
        loaded, beam=options.beam, max_tokens=options.max_tokens, slots=options.slots
    )
    requested, provided = tee(conversations(options.manifest))
    answers = responder.answers(item.problem or item.messages[:-1] for item in requested)
    with progress_counter("conversations") as show:
        for done, (conversation, result) in enumerate(zip(provided, answers, strict=True), 1):
            row: dict[str, object] = {"id": conversation.id}
            if isinstance(result, Answer):
                row |= {"answer": result.text, "reference": _text(conversation)}
                if result.truncated:
                    row["truncated"] = True
            else:
                row["error"] = str(result)
                code = 1
            print_line(json_line(row))
            sys.stdout.flush()
            show(done)
    return code


def _text(conversation: Conversation) -> str:
    return "".join(part for part in conversation.messages[-1].parts if isinstance(part, str))
