"""What of a list is left, and why the rest is not."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effasr.data.audio.waveform import samples_in
from effasr.data.config import DataConfig
from effasr.data.features.frame_geometry import Framing
from effasr.data.filters.config import FilterConfig
from effasr.data.filters.rules import Limits
from effasr.data.prompt import Prompt
from effasr.planning.listing import Listing, select


def data(**settings):
    deviations = settings.pop("rate_deviations", None)
    return DataConfig(filters=FilterConfig(rate_deviations=deviations), **settings)


def listing(seconds, texts):
    return Listing(
        paths=("list",),
        positions=np.stack([np.zeros(len(seconds)), np.arange(len(seconds))], 1).astype(np.int32),
        names=[f"u{number}" for number in range(len(seconds))],
        seconds=np.array(seconds, np.float64),
        texts=np.array(texts, np.int64),
        prompts=np.full(len(seconds), 5),
        prompt_ids=np.zeros(len(seconds), np.int64),
        different_prompts=(Prompt(),),
        by_text=0,
        by_duration=0,
        dropped=(),
    )


def test_every_reason_is_counted_and_listed():
    found = listing(
        [0.05, 41.0, 2.0, 39.0, 9.0, 7.0, 2.0, 2.0, 3.0], [1, 1, 0, 1, 1, 50, 60, 20, 3]
    )
    limits = Limits(max_frames=100, max_positions=60, max_tokens_per_second=8.0)
    chosen = select(found, limits, data(frame_budget=400, token_budget=50))
    assert {drop.id: str(drop.reason) for drop in chosen.dropped} == {
        "u0": "too_short",
        "u1": "too_long",
        "u2": "empty_text",
        "u3": "over_frame_budget",
        "u4": "over_model_length",
        "u5": "over_token_budget",
        "u6": "over_model_length",
        "u7": "token_rate_outlier",
    }
    assert len(chosen) == 1
    assert (chosen.lengths.frames.tolist(), chosen.lengths.tokens.tolist()) == ([38], [8])
    assert chosen.reasons["over_model_length"] == 2
    details = {drop.id: drop.details for drop in chosen.dropped}
    assert details["u0"] == "0.050 s, under `min_duration` 0.1 s"
    assert details["u3"] == "488 encoder frames, over `frame_budget` 400"
    assert details["u5"] == "55 tokens, over 50"
    assert json.dumps(chosen.dropped[1].duration) == "41.0"


def test_ctc_needs_a_frame_for_each_token():
    found = listing([0.8, 0.8], [10, 11])
    assert select(found, Limits(), data(frame_budget=100)).reasons == {"ctc_infeasible": 1}
    assert select(found, Limits(ctc=False), data(frame_budget=100)).reasons == {}


def test_ctc_does_not_limit_translations():
    found = replace(listing([0.8], [11]), different_prompts=(Prompt("de", "en", "translate"),))
    assert select(found, Limits(), data(frame_budget=100)).reasons == {}


def test_rate_outliers_are_those_among_texts_of_their_language():
    found = listing([4.0] * 400, [*[10] * 199, 40, *[40] * 200])
    of_language = np.repeat([0, 1], 200)
    found = replace(found, prompt_ids=of_language, different_prompts=(Prompt(), Prompt("de", "de")))
    chosen = select(found, Limits(), data(frame_budget=100, rate_deviations=4))
    assert [(drop.id, drop.reason) for drop in chosen.dropped] == [("u199", "token_rate_outlier")]
    assert chosen.dropped[0].details == "10.0 per second, far more than others of 4.0 s"


@pytest.mark.parametrize("seconds", [[], [50.0]])
def test_nothing_is_left(seconds):
    with pytest.raises(ValueError, match=rf"list: no utterance can be planned \({len(seconds)} d"):
        select(listing(seconds, [1] * len(seconds)), Limits(), data(frame_budget=100))


@given(st.lists(st.floats(0.1, 40.0), min_size=1, max_size=50))
def test_frames_are_those_of_the_corpus(seconds):
    chosen = select(listing(seconds, [1] * len(seconds)), Limits(), data(frame_budget=1000))
    assert chosen.lengths.frames.tolist() == [Framing().frames(samples_in(s)) for s in seconds]
