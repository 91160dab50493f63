"""The readers of speech language models: a valid input of each, and how it is read.

| reader | what it reads | limits, checked before memory is taken |
| --- | --- | --- |
| conversations | JSON lines with messages, and their audio | as manifest; local files alone |
| chat_template | tokenizer.json, a Jinja template and settings | 1 MiB; rendered in another process: 5 s, 512 MiB, 4 Mi characters |
| language_model | config.json, safetensors | as huggingface; no code of the folder; sizes that the weights have |
| neural_lm | the same for shallow fusion | as language_model |
| second_lm | the same and a tokenizer of transformers, to score texts again | as language_model; 64 MiB a file of the tokenizer |
"""  # noqa: E501

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

from tests.security.reader import LINE_SLACK, Reader, write_rows

TURNS = [
    {"role": "user", "content": "What is said?"},
    {"role": "assistant", "content": "the fox"},
]


def _conversations(folder: Path) -> None:
    soundfile.write(folder / "a.wav", np.zeros(3200, np.float32), 16_000)
    audio = {"type": "audio", "audio": "a.wav", "offset": 0.05, "duration": 0.1}
    asked = {"role": "user", "content": [audio, {"type": "text", "text": "What is said?"}]}
    nemo = [
        {"from": "User", "value": "a.wav", "type": "audio", "duration": 0.1},
        {"from": "Assistant", "value": "the fox", "type": "text"},
    ]
    rows = [{"id": "1", "messages": [asked, TURNS[1]]}, {"id": "2", "conversations": nemo}]
    write_rows(folder / "conversations.jsonl", rows)


def _use_conversations(folder: Path) -> object:
    from effasr.data.audio.audio_file import AudioError
    from effasr.data.audio.waveform import load_audio
    from effasr.data.conversation.messages import conversations, is_conversations

    path = folder / "conversations.jsonl"
    found: list[object] = [is_conversations(path)]
    for one in conversations(path):
        found.append(one.problem)
        for clip in one.clips:
            try:
                found.append(len(load_audio(clip.cut(clip.id))))
            except AudioError as error:
                # As in a corpus, which leaves the conversation out.
                found.append(error)
    return found


def _chat_template(folder: Path) -> None:
    from tests.support.chat_folder import CHATML, write_tokenizer

    write_tokenizer(folder, template="")
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')


def _use_chat_template(folder: Path) -> object:
    from effasr.data.tokenizer.chat import ChatTokenizer

    tokenizer = ChatTokenizer(folder)
    return tokenizer.stop_ids, tokenizer.encode(tokenizer.render(TURNS, asks=True)[:500], "")


def _language_model(folder: Path) -> None:
    from tests.support.chat_folder import write_chat_model

    write_chat_model(folder)


def _use_language_model(folder: Path) -> object:
    from effasr.interop.huggingface.language_model import read_language_model
    from effasr.model.language_model.architecture import read_architecture
    from effasr.model.language_model.config import LanguageModelConfig
    from effasr.model.language_model.model import LanguageModel

    model = LanguageModel(LanguageModelConfig(architecture=read_architecture(folder)), 32)
    read_language_model(folder, model)
    return model


def _use_neural_lm(folder: Path) -> object:
    import torch

    from effasr.decoding.lm.neural import load_neural_lm

    lm = load_neural_lm(folder, 320, 1)
    return lm.scores(torch.tensor([[[5, 6]]]), torch.tensor([[[7, 8]]]))


def _use_second_lm(folder: Path) -> object:
    from effasr.decoding.second_pass.causal_scorer import CausalScorer

    return CausalScorer(folder).log_probs([("the cat", "sat on the mat")])


CONVERSATION_READERS = {
    "conversations": Reader(_conversations, _use_conversations, LINE_SLACK),
    "chat_template": Reader(_chat_template, _use_chat_template),
    "language_model": Reader(_language_model, _use_language_model),
    "neural_lm": Reader(_language_model, _use_neural_lm),
    "second_lm": Reader(_language_model, _use_second_lm),
}
