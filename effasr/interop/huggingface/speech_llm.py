"""Exports a speech language model: transformers' part, and the encoder and adapter beside it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from effasr import config as configuration
from effasr.data.tokenizer import Tokenizer
from effasr.interop.export_checks import refuse_experts
from effasr.interop.huggingface.language_model import write_language_model
from effasr.model.asr import ASRModel

SPEECH_FOLDER, SPEECH_WEIGHTS = "speech", "speech.safetensors"

_README = """# Speech language model

`config.json`, `model.safetensors` and the tokenizer are a causal language model, which
`transformers.AutoModelForCausalLM.from_pretrained` loads from this folder.

`speech/` has what turns speech into its rows, trained with effasr:

- `speech/model.yaml`: the configuration of features, encoder and adapter;
- `speech/speech.safetensors`: the weights `encoder.*` and `language_model.adapter.*`.

To join them: the encoder gives one frame of {width} channels for every {milliseconds:g} ms. Stack
{stack} neighbouring frames, the last ones of a recording extended with zeros, and project them:
{adapter}. Render the conversation with the tokenizer's chat template, with the recording where the
user speaks; tokenize the texts before and after it separately, embed them with the language model's
embedding, put the rows of speech between them, and pass all as `inputs_embeds`.

In effasr, `init_from` of a run or `effasr chat --run` take the checkpoint that this was exported
from.
"""


def export_speech_llm(model: ASRModel, directory: str | Path, tokenizer: Tokenizer) -> None:
    """Write a folder whose language model transformers loads, with a README on how to join it.

    Args:
        model: Model with a language model, adapters merged.
        directory: Created if needed; files of the same names are replaced.
        tokenizer: Its tokenizer.

    Raises:
        ValueError: The model has no language model.
    """
    language_model = model.language_model
    if language_model is None:
        raise ValueError("`model` must have a language model to export, but has none.")
    refuse_experts(model.config, "transformers")
    folder = Path(directory)
    write_language_model(language_model, folder, tokenizer)
    speech = folder / SPEECH_FOLDER
    speech.mkdir(exist_ok=True)
    parts = ("encoder.", "language_model.adapter.")
    weights = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if name.startswith(parts)
    }
    save_file(weights, speech / SPEECH_WEIGHTS, metadata={"format": "pt"})
    (speech / "model.yaml").write_text(configuration.dump(model.config), encoding="utf-8")
    settings = language_model.config
    adapter = "one linear layer, `stack_proj`"
    if settings.adapter == "mlp":
        adapter = "`stack_proj`, GELU and `output_proj`"
    text = _README.format(
        width=model.config.encoder.width,
        milliseconds=1000 * model.config.features.framing.seconds,
        stack=settings.stack,
        adapter=adapter,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
