"""Audio in the rows of Parquet and Arrow files, as Hugging Face's datasets have it.

A row group of a Parquet file can only be decoded as a whole: the last ones stay in memory. Arrow
files are mapped into memory.
"""

import os
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from effasr.untrusted.files import open_regular

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_CACHED_BYTES = 256 << 20  # of decoded columns in a process; one is always cached
_MOST_OPEN = 64  # files


@dataclass(frozen=True, slots=True)
class TableRow:
    """An audio file that is a value of a Parquet or Arrow file."""

    path: str  # The file
    row: int  # From 0
    column: int  # From 0

    def __str__(self) -> str:
        return f"{self.path}[row {self.row}, column {self.column}]"

    @classmethod
    def parse(cls, text: str) -> "TableRow | None":
        """Return the inverse of ``str``; None where the text is no such place."""
        result = _TABLE_ROW.fullmatch(text)
        return result and cls(result[1], int(result[2]), int(result[3]))

    def read(self) -> bytes:
        try:
            return _audio_file(_cache().value(self))
        except _OF_DAMAGE as error:
            problem = str(error).removeprefix(self.path).lstrip(": ")
            raise ValueError(f"{self}: the audio cannot be read: {problem}") from error


_OF_DAMAGE = KeyError, IndexError, TypeError, ValueError, NotImplementedError, MemoryError
_TABLE_ROW = re.compile(r"(.+)\[row (\d+), column (\d+)\]", re.DOTALL)


def _audio_file(value: Any) -> bytes:
    import pyarrow as pa

    if isinstance(value, pa.StructScalar) and value.is_valid:
        names = [field.name for field in value.type]
        value = value["bytes"] if "bytes" in names else pa.scalar(None)
    content = value.as_py()
    if not isinstance(content, bytes) or not content:
        raise ValueError("the cell is empty.")
    return content


class Table:
    """A Parquet or Arrow file, in blocks of rows."""

    problem: str | None = None  # what is wrong behind the last block
    decoded_bytes = 0  # of the largest block, where one is decoded whole to read a row of it

    def __init__(self, schema: "pa.Schema", sizes: Sequence[int]) -> None:
        self.schema = schema
        self._starts = [0, *accumulate(sizes)]

    @property
    def rows(self) -> int:
        return self._starts[-1]

    def block(self, number: int, columns: Sequence[str]) -> "pa.Table":
        raise NotImplementedError

    def has_all(self, number: int, leaf: str) -> bool:
        """Return whether a column, or a field of one, is known to have no nulls in a block."""
        return False

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the number of each block and that of its first row."""
        yield from enumerate(self._starts[:-1])

    def find(self, row: int) -> tuple[int, int]:
        """Return the block of a row, and its number there."""
        if not 0 <= row < self.rows:
            raise IndexError(f"there are {self.rows} rows.")
        number = bisect_right(self._starts, row) - 1
        return number, row - self._starts[number]


class _Parquet(Table):
    def __init__(self, path: str) -> None:
        from pyarrow import parquet

        self._file = parquet.ParquetFile(path, memory_map=True)
        groups = range(self._file.num_row_groups)
        self._groups = [self._file.metadata.row_group(group) for group in groups]
        self.decoded_bytes = max((group.total_byte_size for group in self._groups), default=0)
        super().__init__(self._file.schema_arrow, [group.num_rows for group in self._groups])

    def block(self, number: int, columns: Sequence[str]) -> "pa.Table":
        return self._file.read_row_group(number, columns=list(columns), use_threads=False)

    def has_all(self, number: int, leaf: str) -> bool:
        group = self._groups[number]
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema == leaf and chunk.is_stats_set:
                return chunk.statistics.null_count == 0
        return False


class _Arrow(Table):
    def __init__(self, path: str) -> None:
        import pyarrow as pa

        source = pa.memory_map(path)
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        self._batches: list[pa.RecordBatch] = []
        if is_file:
            reader = pa.ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = reader = pa.ipc.open_stream(source)
        try:
            for batch in batches:
                # Offsets of a damaged file could lead outside of it.
                batch.validate(full=True)
                self._batches.append(batch)
        except (OSError, MemoryError, pa.ArrowInvalid) as error:
            self.problem = f"cannot be read to its end: {' '.join(str(error).split())}"
        super().__init__(reader.schema, [batch.num_rows for batch in self._batches])

    def block(self, number: int, columns: Sequence[str]) -> "pa.Table":
        import pyarrow as pa

        names = [name for name in columns if name in self.schema.names]
        return pa.Table.from_batches([self._batches[number].select(names)])


def open_table(path: str) -> Table:
    """Open a file, whose name ends in .arrow if it is one of Arrow."""
    with open_regular(path):
        pass
    try:
        return (_Arrow if path.endswith(".arrow") else _Parquet)(path)
    except ImportError as error:
        raise ValueError(f"{path}: needs pyarrow: pip install 'effasr[parquet]'.") from error
    except (OSError, MemoryError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"{path}: cannot be read as a table: {problem}") from error


class _Cache:
    """Open files, and the decoded columns that were read last."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._tables: OrderedDict[tuple[object, ...], Table] = OrderedDict()
        self._columns: OrderedDict[tuple[object, ...], pa.ChunkedArray] = OrderedDict()

    def value(self, place: TableRow) -> "pa.Scalar":
        status = os.stat(place.path)
        key = (place.path, status.st_size, status.st_mtime_ns)
        with self._lock:
            table = self._tables.pop(key, None) or open_table(place.path)
            self._tables[key] = table
            if len(self._tables) > _MOST_OPEN:
                self._tables.popitem(last=False)
            number, row = table.find(place.row)
            part = (*key, number, place.column)
            column = self._columns.pop(part, None)
            if column is None:
                column = table.block(number, [table.schema.names[place.column]]).column(0)
                held = column.nbytes + sum(each.nbytes for each in self._columns.values())
                while held > _MOST_CACHED_BYTES and self._columns:
                    held -= self._columns.popitem(last=False)[1].nbytes
            self._columns[part] = column
            return column[row]


_of_process: _Cache | None = None


def _cache() -> _Cache:
    """Return the cache of this process: a fork could inherit a lock that nobody releases."""
    global _of_process
    if _of_process is None or _of_process.process != os.getpid():
        _of_process = _Cache()
    return _of_process
