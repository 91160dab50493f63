"""T5 and BART behind a speech encoder are transformers' own, for texts and for speech."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from effasr.data.batch import IGNORED
from effasr.data.conversation.collate import asking
from effasr.decoding.language_model.engine import ConversationEngine, answers
from effasr.interop.huggingface.language_model import read_language_model, write_language_model
from effasr.model.language_model.architecture import host_read
from tests.model.language_model.test_equivalence import SHAPE, assert_close, packed
from tests.support.speech_llm import (
    ENCODER_DECODERS,
    conversations,
    make_conversation_batch,
    speech_llm,
    speech_llm_config,
)

transformers = pytest.importorskip("transformers")

LIMIT, STOPS = 9, (2, 7)
CASES = pytest.mark.parametrize(
    ("kind", "speech_input"),
    [(kind, part) for kind in ENCODER_DECODERS for part in ("encoder", "decoder")],
)


def examples():
    """Without the second answer of a conversation, which has an example for itself."""
    return [item for number, item in enumerate(conversations()) if number != 2]


def model_of(kind, speech_input, folder):
    """A model, and transformers' of the folder that it is exported to."""
    model = speech_llm(kind, speech_input=speech_input)
    model.language_model.check_against_transformers()
    write_language_model(model.language_model, folder)
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    return model, theirs.eval()


def sources(model, theirs, batch):
    """What transformers' decoder attends to, of the only conversation, and the next rows."""
    language_model, length = model.language_model, batch.source_lengths[0]
    x = language_model.embed(batch, model.encode(batch).values if sum(batch.clip_counts) else None)
    source = x[:length]
    is_text = torch.ones(length, dtype=torch.bool)
    is_text[batch.speech_rows[batch.speech_rows < length]] = False
    encode = theirs.get_encoder()
    if language_model.config.speech_input == "encoder" or is_text.all():
        memory = encode(inputs_embeds=source[None]).last_hidden_state[0]
    else:
        texts = encode(inputs_embeds=source[is_text][None]).last_hidden_state[0]
        memory = source.index_copy(0, is_text.nonzero().flatten(), texts)
    return memory[None], x[length:]


@CASES
def test_logits_and_gradients_are_transformers(kind, speech_input, tmp_path):
    model, theirs = model_of(kind, speech_input, tmp_path)
    logits, loss = [], torch.zeros(())
    for example in examples():
        batch = make_conversation_batch([example])
        memory, rows = sources(model, theirs, batch)
        outputs = theirs(encoder_outputs=(memory,), decoder_inputs_embeds=rows[None])
        counted = batch.targets != IGNORED
        logits.append(outputs.logits[0][counted[batch.source_lengths[0] :]])
        loss = loss + cross_entropy(logits[-1], batch.targets[counted], reduction="sum")
    loss.backward()
    grads = dict(model.named_parameters())
    adapter = {n: x.grad for n, x in grads.items() if n.startswith("language_model.adapter")}
    largest = torch.cat(logits).abs().max().detach()
    expected = torch.cat(logits).detach() / largest, loss.detach() / largest, adapter
    for shape in (None, SHAPE):
        logits, loss, grads = packed(model, shape, examples())
        assert set(grads) == {name for name, grad in grads.items() if grad is not None}
        result = logits / largest, loss / largest, {name: grads[name] for name in adapter}
        assert_close(result, expected)


@CASES
def test_answers_are_transformers(kind, speech_input, tmp_path):
    model, theirs = model_of(kind, speech_input, tmp_path)
    # The decoder of transformers begins with this token.
    start = [theirs.config.decoder_start_token_id]
    questions = [asking("text", [*conversations()[1].rows[:9].tolist(), *start])]
    for seed in range(3):
        spoken = conversations(seed)[0]
        questions.append(asking(f"{seed}", [*spoken.rows[:8].tolist(), *start], spoken.clips))
    expected = {1: [], 24: []}
    for question in questions:
        batch = make_conversation_batch([question])
        memory, _ = sources(model, theirs, batch)
        for beam, texts in expected.items():
            tokens = theirs.generate(
                encoder_outputs=transformers.modeling_outputs.BaseModelOutput(memory),
                decoder_input_ids=batch.tokens.values[None, batch.source_lengths[0] :],
                do_sample=False,
                max_new_tokens=LIMIT,
                eos_token_id=list(STOPS),
                pad_token_id=0,
                forced_eos_token_id=None,
                num_beams=beam,
                **({"length_penalty": 0.0, "early_stopping": "never"} if beam > 1 else {}),
            )[0, 1:].tolist()
            ends = [number for number, token in enumerate(tokens) if token in STOPS]
            texts.append((tuple(tokens[: ends[0]]), False) if ends else (tuple(tokens), True))
    batch = make_conversation_batch(questions)
    for beam, texts in expected.items():
        options = {"beam": beam, "length_penalty": 0.0}
        result = answers(model, batch, [LIMIT] * len(questions), STOPS, **options)
        written = [(item.tokens, item.truncated) for item in result]
        # transformers ranks answers that reach the limit among those that end.
        compared = [n for n, (_, truncated) in enumerate(texts) if beam == 1 or not truncated]
        assert [written[n] for n in compared] == [texts[n] for n in compared]
        for slots in (1, 2):
            engine = ConversationEngine(model, STOPS, slots=slots, **options)
            engine.submit(batch, [LIMIT] * len(questions))
            again = {name: (item.tokens, item.truncated) for name, item in engine.results()}
            assert [again[name] for name in batch.ids] == written


def test_weights_are_read_from_the_folder_of_transformers(tmp_path):
    model, theirs = model_of("t5", "encoder", tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    other = speech_llm("t5", seed=1)
    read_language_model(tmp_path / "theirs", other.language_model)
    expected = model.language_model.state_dict()
    for name, value in other.language_model.state_dict().items():
        assert name.startswith("adapter") or torch.equal(value, expected[name]), name


def test_rows_that_a_causal_model_has_not_are_refused():
    with pytest.raises(ValueError, match="speech_input` must be encoder for a causal"):
        speech_llm("llama", speech_input="decoder")
    assert "a shape each" in str(host_read(speech_llm_config("t5").language_model.architecture))
