import numpy as np
import pytest

from effasr.data.index.corpus_cache import Damaged, map_columns, remove_unused, write_columns

COLUMNS = {
    "bytes": np.arange(5000, dtype=np.uint8),
    "none": np.zeros(0, np.float64),
    "numbers": np.array([-1, 7, 2**40], np.int64),
    "truth": np.array([True, False]),
    "last": np.zeros(0, np.int32),
}


def test_columns_come_back(tmp_path):
    sizes = []
    size = write_columns(tmp_path / "file", "key", COLUMNS, sizes.append)
    assert size == (tmp_path / "file").stat().st_size
    assert sizes == sorted(sizes)
    mapped = map_columns(tmp_path / "file", "key")
    assert list(mapped) == list(COLUMNS)
    for name, values in COLUMNS.items():
        np.testing.assert_array_equal(mapped[name], values)
        assert mapped[name].dtype == values.dtype
    with pytest.raises(ValueError, match="read-only"):
        mapped["numbers"][0] = 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(Damaged, match="its format or key is not the expected one"):
        map_columns(tmp_path / "file", "other")


@pytest.mark.parametrize("place", [40, 16_384, 20_000, 24_599, 28_672])
def test_every_byte_counts(tmp_path, place):
    write_columns(path := tmp_path / "file", "key", COLUMNS)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged):
        map_columns(path, "key")


def test_who_has_mapped_a_file_keeps_it(tmp_path):
    write_columns(path := tmp_path / "file", "key", COLUMNS)
    mapped = map_columns(path, "key")
    write_columns(path, "key", COLUMNS | {"numbers": np.zeros(3, np.int64)})
    assert mapped["numbers"][2] == 2**40
    newer = map_columns(path, "key")["numbers"]
    assert not remove_unused(path)
    assert path.exists()
    del newer
    assert remove_unused(path)
    assert not path.exists()
    assert not remove_unused(path)
