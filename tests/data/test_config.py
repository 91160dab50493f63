"""Messages of the configuration of data, by one table."""

import pytest

from effasr.data.config import DataConfig
from effasr.data.filters.config import FilterConfig, Limits
from effasr.data.mixture import MixConfig
from effasr.data.prompt import Prompt

MIX = MixConfig(sources={"en": "m"})
MESSAGES = [
    (DataConfig, {"frame_budget": 0}, "`frame_budget` must be at least 1, but is 0"),
    (DataConfig, {"micro_batches": 0}, "`micro_batches` must be at least 1, but is 0"),
    (DataConfig, {"token_budget": 0}, "`token_budget` must be at least 1, but is 0: leave it out"),
    (DataConfig, {"workers": -1}, "`workers` must be at least 0, but is -1"),
    (DataConfig, {"on_bad_audio": "ignore"}, "`on_bad_audio` must be 'raise' or 'skip'"),
    (DataConfig, {"min_duration": 9, "max_duration": 3}, "`min_duration` must be greater than 0"),
    (DataConfig, {"train": "m", "mix": MIX}, "`train` must be left out where `mix` is"),
    (DataConfig, {"mix": MIX, "epoch_end": "carry"}, r"null or exact where `mix\.epoch` .* carry"),
    (DataConfig, {"text_share": 0.3, "micro_batches": 4}, "it is 0.3, of 4: use 0.25, for 1 of 4"),
    (DataConfig, {"text_share": 0.5}, "it is 0.5, of 1: use `micro_batches` = 2 or more"),
    (DataConfig, {"text_share": 1.5, "micro_batches": 4}, "not none or all of them; .* use 0.75"),
    (DataConfig, {"text_share": 0.0, "micro_batches": 4}, "not none or all of them; .* use 0.25"),
    (DataConfig, {"text_share": 1, "micro_batches": 4}, "or all of them; it is 1, .* use 0.75"),
    (DataConfig, {"text_token_budget": 9}, "must be left out where `text_share` is null"),
    (
        DataConfig,
        {"text_share": 0.5, "micro_batches": 2, "text_token_budget": 0},
        "`text_token_budget` must be at least 1",
    ),
    (
        DataConfig,
        {"text_share": 0.5, "micro_batches": 2, "strategy": "random"},
        "`text_share` must be null for strategy random",
    ),
    (DataConfig, {"text": "optional", "strategy": "random"}, "`text` must be required or ignored"),
    (
        DataConfig,
        {"text": "ignored", "text_share": 0.5, "micro_batches": 2},
        "`text_share` must be null",
    ),
    (DataConfig, {"label_tokens_per_second": 3.0}, "`label_tokens_per_second` must be"),
    (DataConfig, {"text": "optional", "label_tokens_per_second": 0.0}, "must be greater than 0"),
    (FilterConfig, {"max_tokens_per_second": 0.0}, "greater than 0, but is 0.0: null turns it off"),
    (FilterConfig, {"rate_deviations": float("nan")}, "must be greater than 0, but is nan"),
    (FilterConfig, {"max_dropped": 1.5}, "must be a share from 0 to 1, but is 1.5"),
    (FilterConfig, {"characters": "z-a"}, "must be what stands between the brackets"),
    (Limits, {"min_duration": 0}, "`min_duration` must be greater than 0"),
    (Limits, {"min_duration": 5, "max_duration": 4}, "at most `max_duration`, .* 5 and 4"),
    (Limits, {"frame_budget": 0}, "`frame_budget` must be greater than 0, but is 0"),
    (Limits, {"speed_perturbation": ()}, "must be one to 8 numbers, but are 0"),
    (Limits, {"speed_perturbation": (0.4,)}, "must lie from 0.5 to 2, but one is 0.4"),
    (Limits, {"speed_perturbation": (float("nan"),)}, "`speed_perturbation` must lie from"),
    (Limits, {"speed_perturbation": (1.1, 1.1)}, r"must differ .* \[0.9, 1.0, 1.1\] is usual"),
    (Prompt, {"task": "sing"}, "`task` must be one of transcribe, translate, but is 'sing'"),
    (Prompt, {"source": "de"}, "`target` must be 'de'.*use the task 'translate'"),
    (Prompt, {"task": "translate"}, "both are 'en': use the task 'transcribe'"),
]


@pytest.mark.parametrize(("cls", "fields", "message"), MESSAGES)
def test_messages(cls, fields, message):
    with pytest.raises(ValueError, match=message):
        cls(**fields)


def test_one_path_or_several_and_no_speeds():
    assert DataConfig(train="a").train == ("a",)
    assert DataConfig(speed_perturbation=None).speed_perturbation == (1.0,)
    assert DataConfig(train=("a", "b")).manifests == [("a", 0), ("b", 0)]


def test_an_epoch_that_is_the_corpus_may_carry_over_its_end():
    mix = MixConfig(sources={"en": "m"}, epoch="full")
    assert DataConfig(mix=mix, epoch_end="carry").epoch_end == "carry"


def test_a_transcription_is_monotonic_and_a_translation_is_not():
    assert Prompt().monotonic
    assert not Prompt("de", "en", "translate").monotonic
