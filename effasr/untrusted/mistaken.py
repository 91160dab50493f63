"""Tells what a file is that was taken for a model, such as a pointer or a web page."""

import re
import zipfile
import zlib
from pathlib import Path

from effasr.untrusted.files import open_regular

_HEAD = 4096
_PICKLE_BYTES = 4 << 20  # of the index of a file of torch.save, which names its classes

_AGAIN = "download it again, such as by `hf download`"
_FOLDER = "name a folder with it, config.json and tokenizer.json"
_PAGE = (
    "a web page, such as a site sends in place of a file to whoever is not logged in",
    f"log in, accept its licence, and {_AGAIN}",
)
_LIGHTNING = (
    "a checkpoint of PyTorch Lightning, which has no tokenizer",
    "write the .nemo file with NeMo: `ASRModel.load_from_checkpoint(FILE).save_to('model.nemo')`, "
    "of the class of your model",
)
_OPENAI = (
    "a checkpoint of OpenAI's whisper",
    "convert it with transformers' convert_openai_to_hf.py, or import the same model of Hugging "
    "Face",
)
_TORCH = ("a file of torch.save", f"{_FOLDER}, or write a .nemo file with NeMo's `save_to`")
_ARCHIVE = "unpack it, and name the .nemo file or the folder of the model in it"
_KINDS: tuple[tuple[re.Pattern[bytes], str, str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), what, remedy)
    for pattern, what, remedy in (
        (
            rb"version https://git-lfs\.github\.com/",
            "a pointer of git-lfs to a file that was not downloaded",
            "run `git lfs pull` in its folder, or `hf download`",
        ),
        (rb"\s*<(!doctype\s+html|html|head|body)", *_PAGE),
        (rb"\s*<(\?xml|error)", "an answer of a server in XML", _AGAIN),
        (rb'\s*\{\s*"(error|message|detail)"', "an answer of a server with an error", _AGAIN),
        (rb".{4,12}WhisperSpec", "a model.bin of faster-whisper", _FOLDER),
        (rb"GGUF", "a GGUF file of llama.cpp", "import the model of Hugging Face that it is of"),
        (
            rb".{0,8}\x12.(pytorch|onnx|tf2onnx|skl2onnx|keras2onnx)",
            "an ONNX graph, which has no weights to train",
            "import the model of Hugging Face or NeMo that it is of",
        ),
        (rb"lmgg", "a ggml file of whisper.cpp", "import the model of Hugging Face that it is of"),
        (rb"\x89HDF", "an HDF5 file, as TensorFlow and Keras write", "save it with PyTorch"),
        (rb".{8}\{\s*\"", "a file of safetensors", _FOLDER),
        (rb"\x80[\x02-\x05]", "a pickle, as torch.save wrote before 1.6", _TORCH[1]),
        (rb"(RIFF|fLaC|OggS|ID3)", "a recording", "name a model"),
        (rb"(7z\xbc\xaf|Rar!|\xfd7zXZ|\x28\xb5\x2f\xfd|BZh)", "a packed file", _ARCHIVE),
        (rb"\Z", "empty", _AGAIN),
    )
)


def mistaken(path: Path) -> tuple[str, str] | None:
    """Return what a file is and what to do, or None for what may be a damaged model."""
    with open_regular(path) as file:
        head = file.read(_HEAD)
    if head.startswith(b"PK"):
        return _of_zip(path)
    if not head.startswith(b"\x1f\x8b"):
        return _of(head)
    try:
        inner = zlib.decompressobj(wbits=31).decompress(head, _HEAD)
    except zlib.error:
        return None
    if inner[257:262] == b"ustar":
        return None
    kind = _of(inner)
    return f"a gzip of {'something else' if kind is None else kind[0]}", "unpack it with gunzip"


def wrong_file(path: Path, expected: str, error: object, damaged: str) -> ValueError:
    """Return the error of a file that cannot be read; ``damaged`` is said of what seems right."""
    kind = mistaken(path)
    if kind is None or kind[0] == expected:
        return ValueError(f"{path} {damaged}: {error}: copy it again.")
    return ValueError(f"{path} must be {expected}, but is {kind[0]}: {kind[1]}.")


def _of(head: bytes) -> tuple[str, str] | None:
    return next((kind[1:] for kind in _KINDS if kind[0].match(head)), None)


def _of_zip(path: Path) -> tuple[str, str] | None:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as content:
            names = content.namelist()
            index = next((name for name in names if name.endswith("data.pkl")), None)
            if index is None:
                return f"a zip with {', '.join(names[:3]) or 'nothing'}", _ARCHIVE
            with content.open(index) as pickled:
                text = pickled.read(_PICKLE_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError):
        return None
    if b"pytorch-lightning_version" in text or b"global_step" in text:
        return _LIGHTNING
    return _OPENAI if b"model_state_dict" in text and b"n_audio_ctx" in text else _TORCH
