import pytest

from effasr.data.conversation.messages import AudioPart, conversations, is_conversations
from effasr.data.manifest.reader import named
from tests.support.corpora import write_lines

SPEECH = {"type": "audio", "audio": "a.wav", "offset": 1, "duration": 2.5}


def write(tmp_path, *rows):
    return write_lines(tmp_path / "talks.jsonl", list(rows))


def ours(*turns, name="a"):
    return {"id": name, "messages": [{"role": role, "content": x} for role, x in turns]}


def asked(part):
    return ours(("user", [part]), ("assistant", "b"))


def test_hugging_faces_layout(tmp_path):
    turns = [("system", "be brief"), ("user", [SPEECH, {"type": "text", "text": "what is said?"}])]
    path = write(tmp_path, ours(*turns, ("assistant", [{"type": "text", "text": "hello"}])))
    assert is_conversations(path)
    (result,) = conversations(path)
    assert result.problem is None
    assert result.id == "a"
    assert result.origin == f"{path}:1"
    assert [message.role for message in result.messages] == ["system", "user", "assistant"]
    part = AudioPart(str(tmp_path / "a.wav"), 1.0, 2.5)
    assert result.messages[1].parts == (part, "what is said?")
    (clip,) = result.clips
    assert (clip.audio, clip.offset, clip.duration) == (part.path, 1.0, 2.5)


def test_nemos_layout_joins_neighbouring_turns(tmp_path):
    turns = [
        {"from": "User", "value": "what is said?", "type": "text"},
        {"from": "User", "value": "/b/a.wav", "type": "audio", "duration": 2.5},
        {"from": "Assistant", "value": "hello", "type": "text"},
    ]
    (result,) = conversations(write(tmp_path, {"id": "n", "conversations": turns}))
    assert result.problem is None
    speech = AudioPart("/b/a.wav", None, 2.5)
    assert [m.parts for m in result.messages] == [("what is said?", " ", speech), ("hello",)]


@pytest.mark.parametrize("key", ["path", "audio_url", "url"])
def test_audio_is_named_as_other_models_do(tmp_path, key):
    part = {"type": "audio", key: "x.flac"}
    (result,) = conversations(write(tmp_path, asked(part)))
    assert result.clips[0].audio == str(tmp_path / "x.flac")


WRONG = [
    ("wrong_roles", ours(("assistant", "b")), "must be of user"),
    ("wrong_roles", ours(("user", "a")), "last turn is of user"),
    ("wrong_roles", ours(("user", "a"), ("user", "a"), ("assistant", "b")), "must be of assistant"),
    ("wrong_roles", ours(("tool", "a"), ("assistant", "b")), "'tool'"),
    ("wrong_roles", ours(("user", "a"), ("assistant", [SPEECH])), "only user speaks"),
    ("wrong_roles", ours(("system", "a")), "no turn of user"),
    ("empty_text", ours(("user", "a"), ("assistant", " ")), "assistant is empty"),
    ("malformed_message", {"id": "a", "text": "b"}, "`messages` is missing"),
    ("malformed_message", {"messages": []}, "must be a list with entries"),
    ("malformed_message", {"messages": ["a"]}, "must be an object"),
    ("malformed_message", asked({"type": "image"}), "image"),
    ("malformed_message", asked({"type": "audio"}), "name its file"),
    ("malformed_message", asked({"type": "audio", "url": "https://x/a.wav"}), "download it"),
    ("malformed_message", asked(SPEECH | {"duration": -1}), "greater than 0"),
    ("malformed_message", {"conversations": [{"from": "user", "value": 3}]}, "`value`"),
]


@pytest.mark.parametrize(("reason", "row", "details"), WRONG)
def test_wrong_conversations_are_read_with_their_problem(tmp_path, reason, row, details):
    good = ours(("user", "a"), ("assistant", "b"), name="good")
    first, wrong, last = conversations(write(tmp_path, good, row, {**good, "id": "last"}))
    assert first.problem is None
    assert last.problem is None
    assert wrong.problem.reason == reason
    assert details in str(wrong.problem)


def test_a_second_conversation_of_one_name_is_a_problem(tmp_path):
    row = ours(("user", "a"), ("assistant", "b"))
    _, second = conversations(write(tmp_path, row, row))
    assert second.problem.reason == "malformed_message"


def test_readers_of_utterances_name_the_command_for_conversations(tmp_path):
    path = write(tmp_path, ours(("user", "a"), ("assistant", "b")))
    with pytest.raises(ValueError, match="effasr chat"):
        list(named(path))


def test_other_manifests_are_none_of_conversations(tmp_path):
    assert not is_conversations(write(tmp_path, {"audio_filepath": "a.wav", "text": "b"}))
    assert not is_conversations(tmp_path)
