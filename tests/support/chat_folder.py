"""The folder of a tiny chat model: config.json, tokenizer.json, a chat template and weights."""

import json
from pathlib import Path

from tests.support.speech_llm import ENCODER_DECODERS, architecture

CHATML = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system speaks first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = CHATML.replace(
    "{{ message.content }}",
    "{% if loop.last and message.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}",
) + (
    "{% if add_generation_prompt and not enable_thinking | default(true) %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""As Qwen3's: it writes an empty part for the last answer, and asks for one unless told."""

TEXTS = ["what is said here", "hello world", "the cat sat on the mat", "user assistant system"]


def write_tokenizer(folder: Path, template: str | None = CHATML) -> Path:
    """A byte-level BPE tokenizer with the tokens of ChatML."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_chat_model(folder: Path, kind: str = "llama", **fields) -> Path:
    """A model of this family with random weights, as transformers saves it."""
    from safetensors.torch import save_file

    from effasr.model.language_model.architecture import build_model

    write_tokenizer(folder, None if kind in ENCODER_DECODERS else CHATML)
    text = architecture(kind, vocab_size=320, **fields)
    (folder / "config.json").write_text(text)
    model = build_model(text)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    return folder
