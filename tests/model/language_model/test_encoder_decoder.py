"""T5 and BART behind a speech encoder are transformers' own, for texts and for speech."""

import pytest
import torch

from effasr.data.batch import IGNORED
from effasr.decoding.language_model.engine import ConversationEngine
from effasr.interop.huggingface.language_model import read_language_model, write_language_model
from effasr.model.language_model.architecture import host_read
from tests.decoding.test_conversation_engine import LIMIT, STOPS, ended, questions
from tests.model.language_model.test_equivalence import SHAPE
from tests.support.speech_llm import (
    ENCODER_DECODERS,
    conversations,
    make_conversation_batch,
    speech_llm,
)

transformers = pytest.importorskip("transformers")


def model_of(kind, speech_input, folder):
    """A model, and that of transformers which it reads, which in turn has read another."""
    write_language_model(speech_llm(kind).language_model, folder / "ours")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "ours")
    theirs.save_pretrained(folder / "theirs")
    model = speech_llm(kind, seed=1, speech_input=speech_input)
    read_language_model(folder / "theirs", model.language_model)
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


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
@pytest.mark.parametrize("speech_input", ["encoder", "decoder"])
@torch.no_grad()
def test_logits_and_answers_are_transformers(kind, speech_input, tmp_path):
    model, theirs = model_of(kind, speech_input, tmp_path)
    expected = []
    for example in conversations()[:2]:
        batch = make_conversation_batch([example])
        memory, rows = sources(model, theirs, batch)
        outputs = theirs(encoder_outputs=(memory,), decoder_inputs_embeds=rows[None])
        is_target = batch.targets[batch.source_lengths[0] :] != IGNORED
        expected.append(outputs.logits[0][is_target])
    largest = float(torch.cat(expected).abs().max())
    for shape in (None, SHAPE):
        batch = make_conversation_batch(conversations()[:2], shape=shape)
        logits = model.language_model.logits(model.converse(batch))[batch.targets != IGNORED]
        torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-5 * largest)
    requested, expected = questions(3), {1: [], 24: []}
    for question in requested:
        # The decoder of transformers begins with this token.
        question.rows[-2] = theirs.config.decoder_start_token_id
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
            )
            texts.append(ended(tokens[0, 1:].tolist(), STOPS))
    batch = make_conversation_batch(requested)
    for beam, texts in expected.items():
        # transformers ranks answers that reach the limit among those that end.
        compared = [n for n, (_, truncated) in enumerate(texts) if beam == 1 or not truncated]
        for slots in (1, 2, 3):
            engine = ConversationEngine(model, STOPS, slots=slots, beam=beam)
            engine.submit(batch, [LIMIT] * len(texts), range(len(texts)))
            written = {name: (item.tokens, item.truncated) for name, item in engine.results()}
            assert [written[n] for n in compared] == [texts[n] for n in compared]


def test_rows_that_a_causal_model_has_not_are_refused():
    with pytest.raises(ValueError, match="speech_input` must be encoder for a causal"):
        speech_llm("llama", speech_input="decoder")
    assert "a shape each" in str(host_read(speech_llm("t5").language_model.config.architecture))
