from dataclasses import replace

import numpy as np
import pytest

from effasr.data.sampling.cost import CANARY_180M_FLASH, CostModel

COST = CostModel(frame=5, frame_pair=2, token=7, token_pair=3, token_frame=11)


def test_long_utterances_do_not_overflow() -> None:
    hour = np.array([45_000], np.int32)
    cost = CANARY_180M_FLASH.of(hour, hour)
    assert cost[0] == sum(
        factor * 45_000**power
        for factor, power in (
            (CANARY_180M_FLASH.frame + CANARY_180M_FLASH.token, 1),
            (52_224 + 8_192 + 16_384, 2),
        )
    )
    with pytest.raises(ValueError, match="must cost less than"):
        CANARY_180M_FLASH.of(np.array([2**31 - 1]), hour)


@pytest.mark.parametrize("value", [-1.0, 0.5, float("inf"), float("nan")])
def test_factors_are_whole_flops(value: float) -> None:
    with pytest.raises(ValueError, match="`token` must be 0 or at least 1 FLOP"):
        replace(COST, token=value)
    with pytest.raises(ValueError, match="must be at least 1 FLOP, but all are 0"):
        CostModel(frame=0, frame_pair=0, token=0, token_pair=0, token_frame=0)
