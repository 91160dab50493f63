from pathlib import Path

import numpy as np
import pytest

from effasr.data.sampling.index import LengthIndex
from effasr.data.sampling.plan import UtteranceLengths

LENGTHS = UtteranceLengths(np.array([7, 0, 300], np.int32), np.array([1, 2, 90], np.int32))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.lengths"
    fingerprint = LengthIndex.write(path, LENGTHS, np.array([0, 1, 65_535], np.uint16))
    index = LengthIndex.open(path, verify=True)
    assert len(index) == 3
    assert index.fingerprint == fingerprint
    np.testing.assert_array_equal(index.lengths.frames, LENGTHS.frames)
    np.testing.assert_array_equal(index.lengths.tokens, LENGTHS.tokens)
    assert index.source.tolist() == [0, 1, 65_535]
    assert index.lengths.frames.dtype == index.lengths.tokens.dtype == np.int32
    # It is the file's memory, which no process may change.
    assert not index.lengths.frames.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        index.lengths.frames[0] = 1


def test_the_fingerprint_changes_with_the_values(tmp_path: Path) -> None:
    other = UtteranceLengths(LENGTHS.frames, LENGTHS.tokens[::-1].copy())
    path = tmp_path / "lengths"
    prints = {LengthIndex.write(path, lengths) for lengths in (LENGTHS, other, LENGTHS)}
    prints.add(LengthIndex.write(path, LENGTHS, np.ones(3, np.uint16)))
    assert len(prints) == 3


def test_an_empty_index(tmp_path: Path) -> None:
    empty = UtteranceLengths(np.zeros(0, np.int32), np.zeros(0, np.int32))
    LengthIndex.write(tmp_path / "lengths", empty)
    assert len(LengthIndex.open(tmp_path / "lengths", verify=True)) == 0


def test_one_that_is_replaced_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    LengthIndex.write(path, LENGTHS)
    before = LengthIndex.open(path)
    LengthIndex.write(path, UtteranceLengths(LENGTHS.tokens, LENGTHS.frames))
    assert before.lengths.frames.tolist() == LENGTHS.frames.tolist()
    assert list(tmp_path.iterdir()) == [path]


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lengths"
    LengthIndex.write(path, LENGTHS)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"index of 3 utterances must have 286 bytes, but has 285"):
        LengthIndex.open(path)
    path.write_bytes(whole[:-1] + b"\7")
    LengthIndex.open(path)
    with pytest.raises(ValueError, match="do not have their fingerprint"):
        LengthIndex.open(path, verify=True)
    path.write_bytes(b"\x93NUMPY")
    with pytest.raises(ValueError, match=r"give a file that LengthIndex\.write wrote"):
        LengthIndex.open(path)
    with pytest.raises(ValueError, match=r"`source` must be uint16 \(3,\), but is int64 \(2,\)"):
        LengthIndex.write(path, LENGTHS, np.zeros(2, np.int64))
