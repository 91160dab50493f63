"""YAML that is written has texts as they were, whoever reads it."""

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from effasr.config import _Loader
from effasr.untrusted.documents import dump_scalar, dump_yaml

TEXT = st.one_of(
    st.text(max_size=12),
    st.text("0123456789eE+-._:xob \x85\u2028\u2029\n\t#'\"", max_size=8),
    st.sampled_from(["1e5", "+1E-3", "1.e5", "1_0e3", "null", "yes", "2024-01-01", "<<", "=", "~"]),
)


@given(key=TEXT, texts=st.lists(TEXT, max_size=3))
@example(key="\x85", texts=["a\x85b", "é\u2028\n"])
def test_texts_are_read_as_they_were(key, texts):
    document = {"b": texts, "a": {key: key}}
    for loader in (yaml.SafeLoader, _Loader):
        found = yaml.load(dump_yaml(document), loader)
        assert found == document
        assert list(found) == ["b", "a"]


@given(TEXT)
@example("a\nb")
def test_a_scalar_is_one_line(text):
    written = dump_scalar(text)
    assert len(written.splitlines()) == 1
    for loader in (yaml.SafeLoader, _Loader):
        assert yaml.load(f"name: {written}\n", loader) == {"name": text}


def test_numbers_and_others_stay_plain():
    assert dump_yaml({"a": 1e-05, "b": None, "c": True, "d": "16k"}) == (
        "a: 1.0e-05\nb: null\nc: true\nd: 16k\n"
    )
    assert dump_scalar(None) == "null"
