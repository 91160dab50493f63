"""Reads manifests into a table of utterances, in one process or in several."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from effasr.data import worker_processes
from effasr.data.filters.limits import Limits
from effasr.data.index.utterance_table import IndexBuilder, UtteranceTable
from effasr.data.manifest.reader import Names, Part, named, parts
from effasr.data.manifest.utterance import Utterance
from effasr.data.tokenizer import Tokenizer

Reader = Callable[
    [Sequence[str | Path], Tokenizer, Limits, str, Sequence[int]],
    UtteranceTable,
]
"""Reads manifests with the first five arguments of `build_table`."""

PART = 2_000
"""Manifest lines that a process reads at a time."""

_AHEAD = 4
"""Parts for each process that are read ahead."""


def build_table(
    paths: Sequence[str | Path],
    tokenizer: Tokenizer,
    limits: Limits,
    language: str,
    sources: Sequence[int],
    *,
    jobs: int = 1,
    progress: Callable[[int], None] = lambda count: None,
) -> UtteranceTable:
    """Read manifests, tokenize their texts and drop utterances that cannot be trained on.

    Args:
        paths: Manifests of any kind; audio files are opened only for manifests other than lhotse's.
        tokenizer: Tokenizer of texts and prompts.
        limits: Limits on an utterance.
        language: Default language of utterances.
        sources: Source number of each manifest.
        jobs: Processes that read; the result does not depend on their number.
        progress: Called with the number of utterances read so far.

    Raises:
        ValueError: A manifest is malformed.
        RuntimeError: A reading process was killed.
    """
    builder, count = IndexBuilder(), 0
    for path, source in zip(paths, sources, strict=True):
        work = _Work(tokenizer, limits, language, source)
        if jobs > 1 and worker_processes.context() is not None:
            done = _in_parallel(Path(path), work, jobs)
        else:
            done = _in_turn(path, work)
        for part in done:
            builder.extend(part)
            count += len(part.rows) + len(part.dropped)
            progress(count)
    return builder.table()


@dataclass(frozen=True, slots=True)
class _Work:
    """Reads and indexes parts of a manifest."""

    tokenizer: Tokenizer
    limits: Limits
    language: str
    source: int

    @property
    def untranscribed(self) -> bool:
        """Whether utterances may lack a text."""
        return self.limits.text != "required"

    def utterances(self, part: Part) -> Iterator[Utterance]:
        """Return the utterances of a part."""
        return part.utterances(self.language, untranscribed=self.untranscribed)

    def of(self, part: Part, names: Sequence[str] | None) -> tuple[IndexBuilder, list[str]]:
        """Index a part and return it with the names in the source; ``names`` replaces these."""
        builder, own = IndexBuilder(), []
        for place, utterance in enumerate(self.utterances(part)):
            own.append(utterance.id)
            name = utterance.id if names is None else names[place]
            builder.add(name, utterance, self.limits, self.tokenizer, self.source)
        return builder, own


def _in_turn(path: str | Path, work: _Work) -> Iterator[IndexBuilder]:
    utterances = named(path, language=work.language, untranscribed=work.untranscribed)
    while some := list(islice(utterances, PART)):
        builder = IndexBuilder()
        for name, utterance in some:
            builder.add(name, utterance, work.limits, work.tokenizer, work.source)
        yield builder


def _in_parallel(path: Path, work: _Work, jobs: int) -> Iterator[IndexBuilder]:
    """Yield the indexed parts of a manifest, in order.

    The processes use the names of the source, and this process checks that they are unique. If
    the first part has repeated names, such as files with several utterances, names are assigned
    before.
    """
    names, every = Names(), parts(path, work.language, PART, untranscribed=work.untranscribed)
    first = next(every, None)
    if first is None:
        return
    given = names.take_all(work.utterances(first))
    builder, own = work.of(first, given)
    yield builder
    names_first = given != own
    executor = ProcessPoolExecutor(jobs, worker_processes.context(), _begin, (work, os.getpid()))
    try:
        for part, given, (builder, own) in _in_order(
            executor, every, work, names if names_first else None, jobs
        ):
            if given is None and not names.take_as_they_are(own):
                given = names.take_all(work.utterances(part))
                builder, _ = work.of(part, given)
            yield builder
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"{path}: a process that reads it was killed: if memory ran out, use a machine with "
            "more of it."
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


def _in_order(
    executor: ProcessPoolExecutor,
    every: Iterator[Part],
    work: _Work,
    names: Names | None,
    jobs: int,
) -> Iterator[tuple[Part, list[str] | None, tuple[IndexBuilder, list[str]]]]:
    """Yield the parts with the names assigned to them, if any, and their index."""
    pending: deque[tuple[Part, list[str] | None, Future[tuple[IndexBuilder, list[str]]]]] = deque()
    for part in every:
        given = None if names is None else names.take_all(work.utterances(part))
        pending.append((part, given, executor.submit(_run, part, given)))
        if len(pending) >= _AHEAD * jobs:
            earlier, given, future = pending.popleft()
            yield earlier, given, future.result()
    while pending:
        earlier, given, future = pending.popleft()
        yield earlier, given, future.result()


_work: _Work | None = None
"""The work of a reading process, for all of its parts."""


def _begin(work: _Work, parent: int) -> None:
    global _work
    _work = work
    worker_processes.end_with_parent(parent, 0)


def _run(part: Part, names: Sequence[str] | None) -> tuple[IndexBuilder, list[str]]:
    assert _work is not None
    return _work.of(part, names)
