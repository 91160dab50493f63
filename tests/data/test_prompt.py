import pytest

from effasr.data.prompt import Prompt


def test_a_transcription_is_monotonic_and_a_translation_is_not():
    assert Prompt().monotonic
    assert not Prompt("de", "en", "translate").monotonic


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "sing"}, "`task` must be one of transcribe, translate, but is 'sing'"),
        ({"source": "de"}, "`target` must be 'de'.*use the task 'translate'"),
        ({"task": "translate"}, "both are 'en': use the task 'transcribe'"),
    ],
)
def test_contradictions_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        Prompt(**fields)
