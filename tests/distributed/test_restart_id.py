from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from effasr.distributed.process_group import agree_on_restart_id


@pytest.fixture
def server() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(server: TCPStore, ranks: list[int], size: int, timeout_s: float = 10.0) -> list:
    def one(rank: int):
        # A connection alone may take longer than ranks shall be waited for.
        store = TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
        store.set_timeout(timedelta(seconds=timeout_s))
        try:
            return agree_on_restart_id(store, rank, size, timeout_s)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_all_have_the_same_name_and_nobody_had_it_before(server):
    first, second = meet(server, [0, 1, 2], 3), meet(server, [2, 0, 1], 3)
    assert len(set(first)) == len(set(second)) == 1
    assert first[0] != second[0]


def test_those_who_died_before_all_had_come_are_not_taken_for_those_who_come(server):
    """Of the first three, rank 2 never came, and of the second three rank 0."""
    for ranks in ([0, 1], [1, 2]):
        assert all(isinstance(error, RuntimeError) for error in meet(server, ranks, 3, 0.3))
    assert len(set(meet(server, [0, 1, 2], 3))) == 1
    # And on fewer ranks than before.
    assert len(set(meet(server, [0, 1], 2))) == 1


def test_who_is_missing_is_said(server):
    (error,) = meet(server, [0], 3, 0.2)
    assert str(error) == "rank 0: not all 3 ranks joined within 0.2 s; missing: [1, 2]."
    (error,) = meet(server, [2], 3, 0.2)
    assert str(error) == "rank 2: rank 0 did not join within 0.2 s."
