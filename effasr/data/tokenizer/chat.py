"""Tokenizers of chat models: a ``tokenizer.json`` with a chat template."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from effasr.data.prompt import Prompt
from effasr.data.tokenizer.hugging_face import HuggingFaceTokenizer
from effasr.untrusted.chat_template import render_template
from effasr.untrusted.documents import WRONG_VALUES, read_json_object
from effasr.untrusted.files import read_text

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
GENERATION_FILE, CONFIG_FILE = "generation_config.json", "config.json"

ENCODER_DECODERS = ("t5", "mt5", "umt5", "bart")
"""``model_type`` of language models that read a text by an encoder and write another."""

_PLAIN_TEMPLATE = (
    "{{ bos_token | default('') }}{% for message in messages %}"
    "{% if message.role != 'assistant' or not loop.last %}"
    "{{ '' if loop.first else ' ' }}{{ message.content }}{% endif %}{% endfor %}"
    "{{ eos_token }}START{% if not add_generation_prompt %}"
    "{{ bos_token | default('') }}{{ messages[-1].content }}{{ eos_token }}{% endif %}"
)
"""What the encoder reads and its end; START of the decoder, the answer and its end."""

_TEMPLATE_BYTES = 1 << 20
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTokenizer(HuggingFaceTokenizer):
    """One with a chat template; see `effasr.untrusted.chat_template`."""

    companions = (*HuggingFaceTokenizer.companions, TEMPLATE_FILE, GENERATION_FILE)

    def __init__(self, directory: str | Path) -> None:
        super().__init__(directory)
        folder = Path(directory)
        self._template = read_template(folder)
        if self._template == _plain_template(folder):
            # The folder of a checkpoint has no configuration of the model from which it follows.
            self._files[TEMPLATE_FILE] = self._template.encode()
        self._tokens: dict[str, str] = {}
        settings = _settings(folder)
        for name in _TOKENS:
            value = settings.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                self._tokens[name] = value
        self.sources = self.languages = ()
        stops = [self._id_of(self._tokens["eos_token"])] if "eos_token" in self._tokens else []
        stops += _stops_of_generation(folder, self.vocab_size)
        # The special token that the template writes after a turn of the assistant.
        word = "word"
        turns = [{"role": "user", "content": word}, {"role": "assistant", "content": word}]
        _, result, after = self.render(turns).rpartition(word)
        ids = self.encode(after.strip(), "") if result else []
        specials = set(self.specials.values())
        stops += ids[:1] if ids and ids[0] in specials else []
        if not stops:
            raise ValueError(
                f"{folder}: a token must end a turn, but neither {SETTINGS_FILE} has `eos_token` "
                f"nor the chat template writes one: give `eos_token` in {SETTINGS_FILE}."
            )
        self.stop_ids = tuple(dict.fromkeys(stops))
        self.eos_id = self.stop_ids[0]
        pad = self._tokens.get("pad_token")
        self.pad_id = self.eos_id if pad is None else self._id_of(pad)

    def render(self, messages: Sequence[Mapping[str, str]], *, asks: bool = False) -> str:
        """Return the text of a conversation."""
        variables = {
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": asks,
            # Qwen3 and others: answers are transcripts, without a part in which the model thinks.
            "enable_thinking": False,
            **self._tokens,
        }
        return render_template(self._template, variables)

    def prompt(self, prompt: Prompt) -> list[int]:
        """Refuse: what a chat model reads is a conversation."""
        raise ValueError(
            "`tokenizer` must have prompts for utterances, but is that of a chat model, which "
            "reads conversations: use manifests with `messages`."
        )

    def _id_of(self, token: str) -> int:
        if token not in self._vocabulary:
            raise ValueError(
                f"{self._path.parent / SETTINGS_FILE}: special tokens must be in the vocabulary, "
                f"but {token!r} is not: copy the folder again."
            )
        return self._vocabulary[token]


def has_template(folder: Path) -> bool:
    try:
        read_template(folder)
    except ValueError:
        return False
    return True


def read_template(folder: Path) -> str:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return read_text(path, _TEMPLATE_BYTES)
    template = _settings(folder).get("chat_template")
    if isinstance(template, list):
        named = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = named.get("default")
    if template is None:
        template = _plain_template(folder)
    if not isinstance(template, str):
        raise ValueError(
            f"{folder}: a chat model must have a chat template, but neither {TEMPLATE_FILE} nor "
            f"`chat_template` in {SETTINGS_FILE} is there: take an instruction-tuned model, or "
            f"write {TEMPLATE_FILE}."
        )
    return template


def _plain_template(folder: Path) -> str | None:
    """Return the template of an encoder-decoder model, whose folders have none."""
    path = folder / CONFIG_FILE
    config = read_json_object(path) if path.is_file() else {}
    if config.get("model_type") not in ENCODER_DECODERS:
        return None
    is_pad = config.get("decoder_start_token_id", 0) == config.get("pad_token_id", 0)
    start = "pad_token" if is_pad else "eos_token"
    return _PLAIN_TEMPLATE.replace("START", f"{{{{ {start} }}}}")


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS_FILE
    return read_json_object(path) if path.is_file() else {}


def _stops_of_generation(folder: Path, vocab_size: int) -> list[int]:
    path = folder / GENERATION_FILE
    if not path.is_file():
        return []
    try:
        given = read_json_object(path).get("eos_token_id")
        ids = given if isinstance(given, list) else [] if given is None else [given]
        if all(type(x) is int and 0 <= x < vocab_size for x in ids):
            return ids
    except WRONG_VALUES as error:
        raise ValueError(f"{path}: cannot be read: {error}.") from error
    raise ValueError(f"{path}: `eos_token_id` must be ids of the vocabulary, but is {given!r}.")
