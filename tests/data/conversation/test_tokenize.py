import shutil

import numpy as np
import pytest

from effasr.data.batch import IGNORED
from effasr.data.conversation.messages import AudioPart, Message
from effasr.data.conversation.rows import CLIP, input_rows, num_rows, num_targets
from effasr.data.conversation.tokenize import conversation_rows, prompt_rows, training_rows
from effasr.data.filters.rules import RejectedUtterance
from effasr.data.tokenizer import ChatTokenizer, load_tokenizer
from tests.support.chat_folder import CHATML, THINKING, write_tokenizer

pytest.importorskip("transformers")

SPEECH = AudioPart("/a.wav")
ASKED = (Message("user", ("listen: ", SPEECH, "what?")),)
TALK = (
    Message("system", ("be brief",)),
    *ASKED,
    Message("assistant", ("hello world",)),
    Message("user", ("again",)),
    Message("assistant", ("the cat",)),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("chat")))


def text_of(rows, tokenizer, *, written):
    parts = tokenizer._tokenizer
    ids = [~x if x < 0 else x for x in rows.tolist() if x != CLIP and (x < 0) == written]
    return parts.decode(ids, skip_special_tokens=False)


def test_the_assistants_turns_are_written(tokenizer):
    rows = conversation_rows(TALK, tokenizer)
    assert text_of(rows, tokenizer, written=True) == "hello world<|im_end|>the cat<|im_end|>"
    assert text_of(rows, tokenizer, written=False) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nlisten: what?<|im_end|>\n"
        "<|im_start|>assistant\n\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (rows == CLIP).sum() == 1


def test_targets_are_the_next_tokens_of_the_assistant(tokenizer):
    rows = conversation_rows(TALK, tokenizer)
    tokens, targets, (start,) = input_rows(rows, [4])
    assert len(tokens) == len(targets) == num_rows(rows, [4]) == len(rows) + 3 - 1
    assert (tokens[start : start + 4] == CLIP).all()
    assert (tokens == CLIP).sum() == 4
    assert (targets[start - 1 : start + 4] == IGNORED).all()
    counted = targets != IGNORED
    assert counted.sum() == num_targets(rows)
    # A target is the next input, but for the last.
    assert (targets[:-1][counted[:-1]] == tokens[1:][counted[:-1]]).all()
    assert targets[-1] == tokenizer.stop_ids[0]


def test_stop_tokens(tokenizer):
    assert isinstance(tokenizer, ChatTokenizer)
    assert tokenizer.stop_ids == (tokenizer.specials["<|im_end|>"],)
    assert tokenizer.pad_id == tokenizer.specials["<|endoftext|>"]
    with pytest.raises(ValueError, match="conversations"):
        tokenizer.prompt(None)


def test_the_folder_is_saved_after_it_was_removed(tmp_path):
    """A run that was resumed reads it from a checkpoint, and removes that in time."""
    folder = write_tokenizer(tmp_path / "first", CHATML)
    names = {path.name for path in folder.iterdir()}
    first = load_tokenizer(folder)
    rows = conversation_rows(TALK, first)
    shutil.rmtree(folder)
    first.save(tmp_path / "second")
    assert {path.name for path in (tmp_path / "second").iterdir()} == names
    again = load_tokenizer(tmp_path / "second")
    assert isinstance(again, ChatTokenizer)
    assert np.array_equal(conversation_rows(TALK, again), rows)


def test_templates_that_refuse_or_change_a_conversation(tokenizer, tmp_path):
    late = (*TALK[1:3], Message("system", ("x",)), Message("assistant", ("b",)))
    with pytest.raises(RejectedUtterance, match="the system speaks first") as caught:
        conversation_rows(late, tokenizer)
    assert caught.value.reason == "chat_template"
    shortened = CHATML.replace(
        "{{ message.content }}", "{{ message.content if loop.last else message.content[:2] }}"
    )
    other = load_tokenizer(write_tokenizer(tmp_path / "b", shortened))
    with pytest.raises(RejectedUtterance, match="changes what is before turn 2"):
        conversation_rows(TALK[1:], other)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("thinking"), THINKING))


def test_answers_have_no_part_in_which_the_model_thinks(tokenizer, thinking):
    both = tokenizer, thinking
    targets = [text_of(conversation_rows(TALK[1:3], item), item, written=True) for item in both]
    assert targets[0] == targets[1]
    # Earlier answers are shown without it, which is no obstacle to asking.
    requested = [prompt_rows(TALK[1:4], item) for item in both]
    assert len(requested[1]) > len(requested[0])


def test_answers_that_are_shown_otherwise_later_have_an_example_each(tokenizer, thinking):
    with pytest.raises(RejectedUtterance, match="changes what is before turn 3"):
        conversation_rows(TALK, thinking)
    examples = training_rows(TALK, thinking)
    assert [turns for turns, _ in examples] == [3, 5]
    for (turns, rows), answer in zip(examples, ("hello world", "the cat"), strict=True):
        assert text_of(rows, thinking, written=True) == f"{answer}<|im_end|>"
        requested = prompt_rows(TALK[: turns - 1], thinking)
        assert np.array_equal(rows[: len(requested)], requested)
        assert (rows[len(requested) :] < 0).all()
    assert "hello world" in text_of(examples[1][1], thinking, written=False)
    ((turns, rows),) = training_rows(TALK, tokenizer)
    assert turns == len(TALK)
    assert np.array_equal(rows, conversation_rows(TALK, tokenizer))


def test_an_answer_that_is_never_shown_as_it_is_asked_for(tmp_path):
    template = CHATML + "{% if add_generation_prompt %}Now: {% endif %}"
    other = load_tokenizer(write_tokenizer(tmp_path, template))
    for talk in (TALK, TALK[:3]):
        with pytest.raises(RejectedUtterance, match="changes what is before turn 3"):
            training_rows(talk, other)


def test_a_question_has_the_rows_of_training(tokenizer, tmp_path):
    """Also where the template ends no turn, so that training adds the token that does."""
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    turns += "{% if add_generation_prompt %}assistant: {% endif %}"
    plain = load_tokenizer(write_tokenizer(tmp_path, turns))
    talk = (*TALK[1:4], Message("assistant", ("hello again",)))
    for item in (tokenizer, plain):
        whole, requested = conversation_rows(talk, item), prompt_rows(talk[:-1], item)
        provided = np.where((whole < 0) & (whole != CLIP), ~whole, whole)
        assert np.array_equal(provided[: len(requested)], requested)
        assert (whole[len(requested) :] < 0).all()
        assert text_of(whole, item, written=True).endswith("hello again<|im_end|>")


def test_templates_run_in_a_sandbox(tmp_path):
    attack = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="cannot be rendered"):
        load_tokenizer(write_tokenizer(tmp_path, attack))


def test_private_characters_are_refused(tokenizer):
    talk = (Message("user", ("a\ue0fab",)), Message("assistant", ("b",)))
    with pytest.raises(RejectedUtterance, match="private character"):
        conversation_rows(talk, tokenizer)


def test_clips_must_be_as_many_as_their_places(tokenizer):
    with pytest.raises(ValueError, match="must be as many"):
        input_rows(conversation_rows(TALK, tokenizer), [])
