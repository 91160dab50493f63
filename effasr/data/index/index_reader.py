"""Reads manifests into a table of utterances, in one process or in several."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from effasr.data import worker_processes
from effasr.data.filters.config import Limits
from effasr.data.index.utterance_table import IndexBuilder, UtteranceTable
from effasr.data.manifest.reader import ManifestPart, UniqueNames, checked, named, parts
from effasr.data.manifest.utterance import ReadOptions
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import Tokenizer

Reader = Callable[
    [Sequence[str | Path], Tokenizer, Limits, str, Sequence[int]],
    UtteranceTable,
]
"""Reads manifests with the first five arguments of `build_table`."""

PART = 2_000  # manifest lines that a process reads at a time

_AHEAD = 4  # parts for each process that are read ahead


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

    ``sources`` has the source number of each manifest. ``jobs`` processes read; the result does not
    depend on their number. ``progress`` is called with the number of utterances read so far.
    """
    builder, count = IndexBuilder(), 0
    for path, source in zip(paths, sources, strict=True):
        indexer = _Indexer(tokenizer, limits, language, source)
        if jobs > 1 and worker_processes.context() is not None:
            indexed = _in_parallel(Path(path), indexer, jobs)
        else:
            indexed = _in_turn(path, indexer)
        for part in indexed:
            builder.extend(part)
            count += len(part) + len(part.dropped)
            progress(count)
    return builder.table()


@dataclass(frozen=True, slots=True)
class _Indexer:
    tokenizer: Tokenizer
    limits: Limits
    language: str
    source: int

    @property
    def options(self) -> ReadOptions:
        return ReadOptions(
            Prompt(self.language, self.language),
            untranscribed=self.limits.text != "required",
            text_column=self.limits.text_column,
        )

    def index(
        self, part: ManifestPart, names: Sequence[str] | None
    ) -> tuple[IndexBuilder, list[str]]:
        """Index a part and return it with the names in the source; ``names`` replaces these."""
        builder, ids = IndexBuilder(), []
        for position, utterance in enumerate(part.utterances(self.options)):
            ids.append(utterance.id)
            name = utterance.id if names is None else names[position]
            builder.add(name, checked(name, utterance), self.limits, self.tokenizer, self.source)
        return builder, ids


def _in_turn(path: str | Path, indexer: _Indexer) -> Iterator[IndexBuilder]:
    options = indexer.options
    utterances = named(
        path,
        prompt=options.default,
        untranscribed=options.untranscribed,
        text_column=options.text_column,
    )
    while block := list(islice(utterances, PART)):
        builder = IndexBuilder()
        for name, utterance in block:
            builder.add(name, utterance, indexer.limits, indexer.tokenizer, indexer.source)
        yield builder


def _in_parallel(path: Path, indexer: _Indexer, jobs: int) -> Iterator[IndexBuilder]:
    """Yield the indexed parts of a manifest, in order.

    The processes use the names of the source, and this process checks that they are unique. If
    the first part has repeated names, such as files with several utterances, names are assigned
    before.
    """
    names, options = UniqueNames(), indexer.options
    remaining = parts(path, PART, options)
    first = next(remaining, None)
    if first is None:
        return
    assigned = names.claim_all(first.utterances(options))
    builder, ids = indexer.index(first, assigned)
    yield builder
    assigns_before = assigned != ids
    context = worker_processes.context()
    executor = ProcessPoolExecutor(jobs, context, _initialize_worker, (indexer, os.getpid()))

    def submit(part: ManifestPart) -> _Pending:
        assigned = names.claim_all(part.utterances(options)) if assigns_before else None
        return part, assigned, executor.submit(_index_in_worker, part, assigned)

    try:
        for part, assigned, future in _ahead(map(submit, remaining), _AHEAD * jobs):
            builder, ids = future.result()
            if assigned is None and not names.claim_unchanged(ids):
                assigned = names.claim_all(part.utterances(options))
                builder, _ = indexer.index(part, assigned)
            yield builder
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"{path}: a process that reads it was killed: if memory ran out, use a machine with "
            "more of it."
        ) from error
    finally:
        executor.shutdown(cancel_futures=True)


_Pending = tuple[ManifestPart, list[str] | None, Future[tuple[IndexBuilder, list[str]]]]


def _ahead(items: Iterator[_Pending], count: int) -> Iterator[_Pending]:
    """Yield items in order, after so many further ones have been drawn."""
    pending: deque[_Pending] = deque()
    for item in items:
        pending.append(item)
        if len(pending) >= count:
            yield pending.popleft()
    yield from pending


_worker_indexer: _Indexer | None = None


def _initialize_worker(indexer: _Indexer, parent: int) -> None:
    global _worker_indexer
    _worker_indexer = indexer
    worker_processes.end_with_parent(parent, 0)


def _index_in_worker(
    part: ManifestPart, names: Sequence[str] | None
) -> tuple[IndexBuilder, list[str]]:
    assert _worker_indexer is not None
    return _worker_indexer.index(part, names)
