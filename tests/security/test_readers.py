"""Every reader of foreign files, with mutated inputs; `tests.security.fuzz` tries more."""

import os

import pytest

from tests.security.fuzz import fuzz, table
from tests.security.readers import READERS

INPUTS = int(os.environ.get("EFFASR_FUZZ_INPUTS", "4"))


@pytest.mark.timeout(600 + 2 * INPUTS * len(READERS))
def test_hostile_inputs_are_read_or_refused(tmp_path):
    counts = dict(fuzz(READERS, INPUTS, tmp_path))
    failures = [failure for count in counts.values() for failure in count.failures]
    assert not failures, "\n".join([table(counts), *failures])
    assert all(count.tried == INPUTS for count in counts.values())
    # Mutations that every reader takes would show nothing.
    assert sum(count.refused for count in counts.values()) > INPUTS * len(READERS) // 4
