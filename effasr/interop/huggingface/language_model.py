"""Language models in transformers' folders, and exported speech language models."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from effasr import config as configuration
from effasr.data.tokenizer import Tokenizer
from effasr.interop.huggingface.files import SAFETENSORS, read_weights, write_json
from effasr.interop.tables import refuse_experts
from effasr.model.asr import ASRModel
from effasr.model.language_model.model import LanguageModel
from effasr.untrusted.documents import parse_json


def read_language_model(directory: str | Path, model: LanguageModel) -> None:
    """Load the safetensors of a folder into a model of the folder's architecture."""
    try:
        weights = read_weights(Path(directory), SAFETENSORS)
    except FileNotFoundError as error:
        raise ValueError(
            f"{error} The weights of a language model are read from safetensors alone; set "
            "model.language_model.weights=random to draw them."
        ) from error
    state, names = model.state_dict(), dict(model.causal_names())
    if not any(name.startswith(model.prefix) for name in weights):
        # A folder of the base model, which has no name for it.
        expected = set(names.values())
        weights = {n if n in expected else model.prefix + n: value for n, value in weights.items()}
    missing = [theirs for theirs in names.values() if theirs not in weights]
    unknown = weights.keys() - set(names.values()) - model.tied_names
    # BART's bias of logits, in all but a few models zeros.
    unknown = {name for name in unknown if name != "final_logits_bias" or weights[name].any()}
    if missing or unknown:
        first = f"lacks {missing[0]}" if missing else f"has {min(unknown)}, which is unknown"
        raise ValueError(
            f"{directory}: its weights must be those of its config.json, but differ in "
            f"{len(missing) + len(unknown)} names: it {first}: copy the folder again."
        )
    for ours, theirs in names.items():
        if weights[theirs].shape != state[ours].shape:
            raise ValueError(
                f"{directory}: {theirs} must have the shape {tuple(state[ours].shape)} of its "
                f"config.json, but has {tuple(weights[theirs].shape)}: copy the folder again."
            )
    with torch.no_grad():
        for ours, theirs in names.items():
            state[ours].copy_(weights[theirs])


def write_language_model(
    model: LanguageModel, directory: str | Path, tokenizer: Tokenizer | None = None
) -> None:
    """Write a folder that an ``AutoModel`` of transformers loads; adapters must be merged."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    weights = {
        theirs: state[ours].detach().cpu().clone(memory_format=torch.contiguous_format)
        for ours, theirs in model.causal_names()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert model.config.architecture is not None
    mapping = parse_json(model.config.architecture, "language_model.architecture")
    # The weights are written in float32.
    mapping.pop("torch_dtype", None)
    write_json(folder / "config.json", {**mapping, "dtype": "float32"})
    if tokenizer is not None:
        tokenizer.save(folder)


SPEECH_FOLDER, SPEECH_WEIGHTS = "speech", "speech.safetensors"

_README = """# Speech language model

`config.json`, `model.safetensors` and the tokenizer are a language model, which
`transformers.{loader}.from_pretrained` loads from this folder.

`speech/` has what turns speech into its rows, trained with effasr:

- `speech/model.yaml`: the configuration of features, encoder and adapter;
- `speech/speech.safetensors`: the weights `encoder.*` and `language_model.adapter.*`.

To join them: the encoder gives one frame of {width} channels for every {milliseconds:g} ms. Stack
{stack} neighbouring frames, the last ones of a recording extended with zeros, and project them:
{adapter}. Render the conversation with the tokenizer's chat template, with the recording where the
user speaks; tokenize the texts before and after it separately, embed them with the language model's
embedding, put the rows of speech between them, and pass all as `inputs_embeds`.{memory}

In effasr, `init_from` of a run or `effasr chat --run` take the checkpoint that this was exported
from.
"""

_MEMORY = """ Pass the texts
alone: the decoder's `encoder_hidden_states` are the encoder's output and the rows of speech."""


def export_speech_llm(model: ASRModel, directory: str | Path, tokenizer: Tokenizer) -> None:
    """Write a folder whose language model transformers loads, with a README on how to join it."""
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
        loader=language_model.loader,
        memory=_MEMORY if settings.speech_input == "decoder" else "",
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
