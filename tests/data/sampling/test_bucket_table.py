import json

import numpy as np
import pytest

from effasr.data.batch import StaticShape
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.sampling.plan import UtteranceLengths

SHAPE = StaticShape(frame_budget=8000, token_budget=2400, max_sequences=1000)


def lengths_of(frames: list[int], tokens: list[int]) -> UtteranceLengths:
    return UtteranceLengths(np.array(frames, np.int32), np.array(tokens, np.int32))


def corpus(count: int = 5000) -> UtteranceLengths:
    generator = np.random.default_rng(0)
    frames = generator.integers(10, 400, count)
    tokens = 5 + frames * generator.normal(0.3, 0.04, count).clip(0.15, 0.45)
    return UtteranceLengths(frames.astype(np.int32), tokens.astype(np.int32))


def test_derived_buckets_share_durations_and_tokens_evenly() -> None:
    lengths = corpus()
    table = BucketTable.derive(lengths, SHAPE, 10)
    result = table.assign(lengths)
    assert len(table.bins) == 20
    totals = np.bincount(result, lengths.frames, 20).reshape(10, 2).sum(1)
    assert totals.max() < 1.1 * totals.mean()
    tokens = np.bincount(result, lengths.tokens, 20).reshape(10, 2)
    assert np.all(np.abs(tokens[:, 0] / tokens.sum(1) - 0.5) < 0.06)
    for number, (frames, tokens) in enumerate(table.bins):
        assert (lengths.frames[result == number] <= frames).all()
        assert (lengths.tokens[result == number] <= tokens).all()
        size = table.batch_sizes[number]
        assert size * frames <= SHAPE.frame_budget
        assert size * tokens <= SHAPE.token_budget
        assert (size + 1) * frames > SHAPE.frame_budget or (size + 1) * tokens > 2400


def test_a_few_texts_that_are_far_too_long_do_not_make_batches_small() -> None:
    lengths = corpus()
    tokens = lengths.tokens.copy()
    odd = np.flatnonzero(lengths.frames < 100)[:3]
    tokens[odd] = [700, 800, 90]
    spoilt = UtteranceLengths(lengths.frames, tokens)
    table, clean = (BucketTable.derive(x, SHAPE, 10) for x in (spoilt, lengths))
    # Two of them need a bucket of their own; the third has room among longer utterances.
    assert table.bins == (*clean.bins, (399, 800))
    assert table.batch_sizes[:-1] == clean.batch_sizes
    result = table.assign(spoilt)
    assert result[odd[:2]].tolist() == [20, 20]
    assert clean.assign(lengths)[odd[2]] < result[odd[2]] < 20


def test_utterances_go_to_the_first_bucket_with_room() -> None:
    table = BucketTable(((10, 5), (10, 9), (20, 8), (20, 30)), (4, 3, 2, 1))
    lengths = lengths_of([10, 10, 10, 11, 0, 20, 5], [5, 6, 10, 1, 0, 9, 12])
    assert table.assign(lengths).tolist() == [0, 1, 3, 2, 0, 3, 3]
    with pytest.raises(ValueError, match=r"but 1 of 1 do not: number 0 has 21 frames .* 20 and 30"):
        table.assign(lengths_of([21], [1]))


def test_tables_of_nemo_s_optimizer_can_be_read(tmp_path) -> None:
    """Durations are rounded up to the frames that such an utterance has."""
    content = {
        "bucket_duration_bins": [[3.975, 30], [3.975, 48], [20, 122], [20.264, 122]],
        "bucket_batch_size": [352, 308, 63, 62],
    }
    (tmp_path / "buckets.json").write_text(json.dumps(content))
    table = BucketTable.load(tmp_path / "buckets.json")
    assert table.bins == ((50, 30), (50, 48), (250, 122), (254, 122))
    assert table.batch_sizes == (352, 308, 63, 62)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a readable JSON file"),
        ("[]", "must be an object with `bucket_duration_bins` and `bucket_batch_size`"),
        ('{"bucket_duration_bins": [[1, 2]]}', "must be an object with"),
        (("[1.5]", "[1]"), r"`bucket_duration_bins` must be a list of pairs \[seconds, tokens\]"),
        (("[[1.5, 2.5]]", "[1]"), "must be a list of pairs"),
        (("[[1.5, 2]]", "[1.5]"), "`bucket_batch_size` must be a list of whole numbers"),
        (("[[1.5, 2]]", "[1, 2]"), "must have one entry for each of `bins`.* have 2 and 1"),
        (("[[1.5, 2]]", "[0]"), "at least 1, but one"),
        (("[]", "[]"), "at least one, but they"),
    ],
)
def test_malformed_tables_are_refused(tmp_path, content, message) -> None:
    if isinstance(content, tuple):
        bins, sizes = content
        content = f'{{"bucket_duration_bins": {bins}, "bucket_batch_size": {sizes}}}'
    (tmp_path / "buckets.json").write_text(content)
    with pytest.raises(ValueError, match=rf"buckets\.json: .*{message}"):
        BucketTable.load(tmp_path / "buckets.json")


def test_a_table_must_ascend_and_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"`bins` must ascend, .* \(10, 5\) follows \(10, 6\)"):
        BucketTable(((10, 6), (10, 5)), (1, 1))
    with pytest.raises(ValueError, match=r"none\.json: not a readable JSON file"):
        BucketTable.load(tmp_path / "none.json")
