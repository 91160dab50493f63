"""Every reader of foreign files: a valid input of each, and how it is read.

docs/security.md has their limits.
"""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import soundfile
import torch

from effasr import config
from effasr.checkpoint import MANIFEST, load_model, save_model
from effasr.data.audio.audio_file import AudioError
from effasr.data.audio.augmentation.augmenter import Clips
from effasr.data.audio.waveform import load_audio, read_audio, read_header
from effasr.data.checksums import checksum
from effasr.data.conversation.messages import conversations, is_conversations
from effasr.data.features.config import FeatureConfig
from effasr.data.filters.config import Limits
from effasr.data.manifest.cuts import prompt_of
from effasr.data.manifest.pairs import is_text_only, pairs
from effasr.data.manifest.reader import read
from effasr.data.sampling.bucket_table import BucketTable
from effasr.data.tokenizer import NeMoTokenizer, load_tokenizer, train_tokenizer
from effasr.decoding.config import DecodingConfig
from effasr.decoding.lm.neural import load_neural_lm
from effasr.decoding.lm.ngram import load_ngrams
from effasr.decoding.lm.words import load_word_ngrams
from effasr.distributed.tensor_files import read_whole
from effasr.evaluation.comparison import compare, read_run
from effasr.evaluation.tuning.decoding_file import read_decoding, write_decoding
from effasr.interop.huggingface.checkpoint import export_model, import_model
from effasr.interop.nemo.checkpoint import export_nemo, import_nemo
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr.planning.listing import read_listing
from effasr.training.checkpointing.run_checkpoints import TENSORS, RunCheckpoints
from effasr.training.config import TrainConfig
from effasr.transcription.inputs.audio_stream import open_stream
from effasr.transcription.label import LabelFolder
from effasr.transcription.online import OnlineRecognizer
from effasr_kernels import Context
from tests.support.archives import extract
from tests.support.real_ffmpeg import real_ffmpeg
from tests.support.sources import SOURCES

RATE = 16_000
LINE_SLACK = 96 << 20
"""Of files of lines: a line of 32 MiB is refused after it was read, and gzip may unpack 64 MiB."""
ARCHIVE_SLACK = 192 << 20
"""Of archives: a file of 64 MiB may be packed, and is held about twice while it is read."""
NEMO = Path(__file__).parents[1] / "interop" / "nemo"
PROFILING = Path(__file__).parents[2] / "profiling"
SMALL = FastConformerConfig(width=16, layers=1, heads=2, feed_forward=32, subsampling_channels=4)
ARPA = """\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-1.5\t<unk>
-99\t<s>\t-0.3
-0.6\t0\t-0.25
-0.7\t1\t-0.1

\\2-grams:
-0.2\t<s> 0
-0.3\t0 1

\\end\\
"""
TURNS = [
    {"role": "user", "content": "What is said?"},
    {"role": "assistant", "content": "the fox"},
]


@dataclass(frozen=True)
class Reader:
    """Writes a valid input into a folder, and reads the input in a folder."""

    make: Callable[[Path], object]
    read: Callable[[Path], object]
    # Resident memory that any input may take, beside twice its size and twice that of a valid one.
    slack: int = 16 << 20
    writes: bool = False  # Whether reading writes into the folder


def sound(path: Path, seconds: float = 0.2) -> None:
    draw = np.random.default_rng(0)
    soundfile.write(path, draw.uniform(-0.5, 0.5, int(seconds * RATE)).astype(np.float32), RATE)


def put(path: Path, content: Any) -> None:
    """Write JSON lines of a list, sound of so many seconds, an object, a text or bytes."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, float):
        return sound(path, content)
    if isinstance(content, list):
        content = "".join(json.dumps(row) + "\n" for row in content)
    elif isinstance(content, dict):
        content = json.dumps(content)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def files(contents: dict[str, Any]) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        for name, content in contents.items():
            put(folder / name, content)

    return make


# Data.


def use_manifest(path: Path) -> object:
    cuts: Any = read(path)
    return [(prompt_of(cut), len(load_audio(cut))) for cut in cuts]


def read_cuts(folder: Path) -> Any:
    MANIFEST_FILES(folder)
    cuts = read(folder / "manifest.jsonl")
    (folder / "manifest.jsonl").unlink()
    return cuts


def make_cuts(folder: Path) -> None:
    put(folder / "cuts.jsonl.gz", [cut.to_dict() for cut in list(read_cuts(folder))])


def make_shar(folder: Path) -> None:
    read_cuts(folder).to_shar(str(folder), fields={"recording": "flac"}, shard_size=3)
    (folder / "a.wav").unlink()


def source(name: str) -> Reader:
    """Recordings inside other files, which are read by their places."""

    def make(folder: Path) -> None:
        sound(folder / "a.wav")
        rows = [{"audio_filepath": "a.wav", "text": text} for text in ("the fox", "jumps")]
        put(folder / "manifest.jsonl", rows)
        SOURCES[name](folder / "manifest.jsonl", folder)
        (folder / "manifest.jsonl").unlink()
        (folder / "a.wav").unlink()

    return Reader(make, use_manifest, LINE_SLACK)


def make_clips(folder: Path) -> None:
    put(folder / "clips.jsonl", [cut.recording.to_dict() for cut in list(read_cuts(folder))])


def use_clips(folder: Path) -> object:
    clips = Clips.load([folder / "clips.jsonl"], "noise")
    return [len(clips.read(index)) for index in range(len(clips))]


def use_plan(folder: Path) -> object:
    return len(read_listing(sorted(folder.iterdir()), limits=Limits()).columns.frames)


def use_text_pairs(folder: Path) -> object:
    return is_text_only(folder / "pairs.jsonl") and list(pairs(folder / "pairs.jsonl"))


def use_conversations(folder: Path) -> object:
    path = folder / "conversations.jsonl"
    results: list[object] = [is_conversations(path)]
    for conversation in conversations(path):
        results.append(conversation.problem)
        for clip in conversation.clips:
            try:
                results.append(len(load_audio(clip.cut(clip.id))))
            except AudioError as error:
                # As in a corpus, which leaves the conversation out.
                results.append(error)
    return results


def use_arpa(folder: Path) -> object:
    path = folder / "lm.arpa.gz"
    tokens = load_ngrams(path, 4, 3).scores(torch.tensor([[[-1, 0]]]), torch.tensor([[[0, 1]]]))
    return tokens, load_word_ngrams(path).log_probs([("", "0 1"), ("0", "x")])


def make_trace(folder: Path) -> None:
    from tests.profiling.kineto_trace import Trace

    trace = Trace()
    for start in (1000, 3000):
        trace.note("ProfilerStep#1", start, start + 1500)
        trace.operator("aten::mm", start, start + 300, sequence=start)
        trace.kernel(start + 100, start + 200, start + 900)
    trace.flow(1, (100, 1000), (177, 3000))
    trace.write(folder / "trace.json")
    trace.write(folder / "trace2.json.gz")


def make_nsys(folder: Path) -> None:
    from tests.profiling.nsys_export import Export

    export = Export()
    for start in (1000, 3000):
        export.range("step", start, start + 1500)
        export.kernel(start + 100, start + 200, start + 900)
    export.write(folder / "a.sqlite")


def use_captures(folder: Path) -> object:
    sys.path[:0] = [str(PROFILING)] if str(PROFILING) not in sys.path else []
    from analysis import sources

    return [len(sources.read(path).work) for path in sorted(folder.iterdir())]


def audio(suffix: str) -> Reader:
    name = f"a.{suffix}"
    return Reader(
        files({name: 0.05}), lambda folder: (read_header(folder / name), read_audio(folder / name))
    )


def ffmpeg_audio(suffix: str, program: str) -> Reader:
    def make(folder: Path) -> None:
        path = folder.parent / "bin"
        path.mkdir()
        (path / "ffmpeg").symlink_to(program)
        sound(path / "a.wav", 0.5)
        quiet = (program, "-nostdin", "-v", "error")
        command = [*quiet, "-i", path / "a.wav", folder / f"a.{suffix}"]
        subprocess.run(command, check=True, capture_output=True)

    def use(folder: Path) -> object:
        with mock.patch.dict(os.environ, PATH=str(folder.parent / "bin")):
            return sum(map(len, open_stream(folder / f"a.{suffix}", RATE).blocks))

    return Reader(make, use)


# Models.


@lru_cache
def tokenizer(folder: str) -> Any:
    text = ["the quick brown fox jumps over the lazy dog", "a large fawn jumped quickly"] * 20
    return train_tokenizer({"en": text}, folder, vocab_size=40)


def own_tokenizer(folder: Path) -> Any:
    return tokenizer(str(folder.with_name("own")))


def model(vocab_size: int = 21, **parts: Any) -> ASRModel:
    features = FeatureConfig(mel_bins=16)
    options = {"features": features, "encoder": SMALL, "decoder": None, **parts}
    return ASRModel(ModelConfig(**options), vocab_size)


def make_nemo_tokenizer(folder: Path) -> None:
    models = own_tokenizer(folder).models
    NeMoTokenizer({"en": models["en"], "de": models["en"]}).save(folder)


def make_tokenizer_json(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"the": 0, "fox": 1, "<unk>": 2, "<pad>": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))


def make_tokenizer_parts(folder: Path) -> None:
    from tests.interop.whisper import make_tokenizer

    whole = json.loads(make_tokenizer().to_str())
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    put(folder / "vocab.json", whole["model"]["vocab"])
    put(folder / "merges.txt", "\n".join(["#version: 0.2", *merges]) + "\n")
    put(folder / "added_tokens.json", {x["content"]: x["id"] for x in whole["added_tokens"]})


def use_tokenizer(folder: Path) -> object:
    loaded = load_tokenizer(folder)
    language = loaded.languages[0] if loaded.languages else "en"
    return loaded.decode(loaded.encode("the quick fox", language)[:50])


def use_huggingface(folder: Path) -> object:
    return ASRModel.from_state_dict(*import_model(folder))


def exported(**parts: Any) -> Reader:
    return Reader(lambda folder: export_model(model(**parts), folder), use_huggingface)


def make_whisper(folder: Path) -> None:
    from tests.interop import whisper

    whisper.make_whisper(folder, d_model=16, encoder_ffn_dim=16, decoder_ffn_dim=16)


def make_model_directory(folder: Path) -> None:
    local = own_tokenizer(folder)
    save_model(folder, model(local.vocab_size, ctc=True), local)


def make_checkpoint(folder: Path) -> None:
    local = own_tokenizer(folder)
    state = {"step": 1, "moment": torch.arange(3.0), "config": {"betas": [0.9, 0.98]}}
    moments = {"optimizer/0/exp_avg": torch.ones(4, 3), "trained/bias": torch.zeros(5)}
    checkpoints = RunCheckpoints(folder, keep=1)
    checkpoints.save(1, model(local.vocab_size, ctc=True), local, state, moments)


def use_checkpoint(folder: Path) -> object:
    newest = RunCheckpoints(folder, keep=1).newest()
    return newest and (load_model(newest[0]), read_whole(newest[0] / TENSORS))


def use_forged_checkpoint(folder: Path) -> object:
    """Read a checkpoint after its checksums are made to match: they are no protection."""
    for path in folder.glob("step_*"):
        contents = [x for x in path.rglob("*") if x.is_file() and x.name != MANIFEST]
        sums = {str(x.relative_to(path)): checksum(x) for x in contents}
        # A mutation may have made a link of it, through which this would write.
        if (path / MANIFEST).is_file() and not (path / MANIFEST).is_symlink():
            put(path / MANIFEST, {"step": 1, "files": sums})
    return use_checkpoint(folder)


def nemo(kind: str, *, unpack: bool = True) -> Reader:
    def make(folder: Path) -> None:
        content = (NEMO / f"{kind}.nemo").read_bytes()
        # Unpacked, so that mutations find the tar.
        is_packed = unpack and content.startswith(b"\x1f\x8b")
        put(folder / "model.nemo", gzip.decompress(content) if is_packed else content)

    return Reader(make, lambda folder: use_nemo(folder / "model.nemo"), ARCHIVE_SLACK)


def use_nemo(path: Path) -> ASRModel:
    imported = import_nemo(path)
    return ASRModel.from_state_dict(imported.config, imported.vocab_size, imported.state)


def make_nemo_streaming(folder: Path) -> None:
    encoder = FastConformerConfig(
        width=16, layers=1, heads=2, feed_forward=32, subsampling_channels=4, conv_kernel=5,
        conv_norm="layer_norm", context=(Context(6, 0, 3), Context(4, 0, 2)),
        causal_convolution=True, causal_subsampling=True,
    )  # fmt: skip
    local = own_tokenizer(folder)
    streaming = model(
        local.vocab_size, features=FeatureConfig(normalize=False), encoder=encoder, ctc=True
    )
    export_nemo(streaming, local, folder / "packed.nemo")
    extract(folder / "packed.nemo", folder)
    (folder / "packed.nemo").unlink()


def use_nemo_streaming(folder: Path) -> object:
    recognizer = OnlineRecognizer(use_nemo(folder).eval(), own_tokenizer(folder))
    stream = recognizer.open()
    stream.feed(np.zeros(RATE, np.float32))
    stream.finish()
    return recognizer.decode()


def make_chat_template(folder: Path) -> None:
    from tests.support.chat_folder import CHATML, write_tokenizer

    write_tokenizer(folder, template="")
    put(folder / "chat_template.jinja", CHATML)
    put(folder / "generation_config.json", {"eos_token_id": [1, 2]})


def use_chat_template(folder: Path) -> object:
    from effasr.data.tokenizer.chat import ChatTokenizer

    chat = ChatTokenizer(folder)
    return chat.stop_ids, chat.encode(chat.render(TURNS, asks=True)[:500], "")


def make_language_model(folder: Path) -> None:
    from tests.support.chat_folder import write_chat_model

    write_chat_model(folder)


def use_language_model(folder: Path) -> object:
    from effasr.interop.huggingface.language_model import read_language_model
    from effasr.model.language_model.architecture import read_architecture
    from effasr.model.language_model.config import LanguageModelConfig
    from effasr.model.language_model.model import LanguageModel

    llm = LanguageModel(LanguageModelConfig(architecture=read_architecture(folder)), 32)
    read_language_model(folder, llm)
    return llm


def use_neural_lm(folder: Path) -> object:
    scores = load_neural_lm(folder, 320, 1).scores
    return scores(torch.tensor([[[5, 6]]]), torch.tensor([[[7, 8]]]))


def use_second_lm(folder: Path) -> object:
    from effasr.decoding.second_pass.causal_scorer import CausalScorer

    return CausalScorer(folder).log_probs([("the cat", "sat on the mat")])


ROW = {"audio_filepath": "a.wav", "text": "the fox", "duration": 0.2, "lang": "en"}
MANIFEST_FILES = files(
    {"a.wav": 0.2, "manifest.jsonl": [ROW | {"id": "1"}, ROW | {"id": "2", "speaker": "s"}]}
)
PAIR = {"source_text": "the fox", "text": "der Fuchs", "source_lang": "en", "target_lang": "de"}
FOLDER_ROW = {"file_name": "a.wav", "text": "the fox", "duration": 0.2}
SEGMENT = {
    "id": "a", "audio_filepath": "a.wav", "offset": 0.0, "duration": 1.0, "text": "the fox",
    "source_lang": "en", "target_lang": "en", "pnc": True, "confidence": 0.5, "pseudo": True,
    "truncated": False,
}  # fmt: skip
CLIP = {"type": "audio", "audio": "a.wav", "offset": 0.05, "duration": 0.1}
ASKED = {"role": "user", "content": [CLIP, {"type": "text", "text": "What is said?"}]}
NEMO_TURNS = [
    {"from": "User", "value": "a.wav", "type": "audio", "duration": 0.1},
    {"from": "Assistant", "value": "the fox", "type": "text"},
]
TALKS = [{"id": "1", "messages": [ASKED, TURNS[1]]}, {"id": "2", "conversations": NEMO_TURNS}]
PLANNED = [{"duration": 2.5, "num_tokens": 9}, {"duration": 1.0, "text": "the fox", "id": "1"}]
# Of lines: the files, and how they are read.
LINES: dict[str, tuple[dict[str, Any], Callable[[Path], object]]] = {
    "kaldi": (
        {
            "a.wav": 0.2,
            "wav.scp": "r1 a.wav\n",
            "text": "u1 the fox\nu2 jumps\n",
            "segments": "u1 r1 0.0 0.1\nu2 r1 0.1 -1\n",
            "utt2spk": "u1 s\nu2 s\n",
        },
        use_manifest,
    ),
    "csv_folder": (
        {"a.wav": 0.2, "metadata.csv": 'file_name,text,id\na.wav,"the, fox",1\na.wav,dog,2\n'},
        use_manifest,
    ),
    "json_folder": (
        {"a.wav": 0.2, "metadata.jsonl": [FOLDER_ROW, FOLDER_ROW | {"id": "2"}]},
        use_manifest,
    ),
    "librispeech": ({"1/1-0.flac": 0.2, "1/1.trans.txt": "1-0 THE FOX\n"}, use_manifest),
    "neighbours": ({"a.wav": 0.2, "a.txt": "the fox\n"}, use_manifest),
    "plan_list": ({"list.jsonl": PLANNED}, use_plan),
    "plan_table": (
        {
            "table.tsv": "id\tduration_seconds\tn_tokens\na\t2.5\t9\nb\t1\t\n",
            "seconds.txt": "# of a corpus\n2.5\n1.0\n",
        },
        use_plan,
    ),
    "text_pairs": ({"pairs.jsonl": [PAIR, PAIR]}, use_text_pairs),
    "arpa": ({"lm.arpa.gz": ARPA}, use_arpa),
    "evaluation": (
        {
            "wer.json": {"normalizer": "basic", "rtfx": 3.0, "failed": 0, "wer": 0.5, "words": 2},
            "hypotheses.jsonl": [
                {"id": str(n), "reference": "the fox", "hypothesis": "a fox"} for n in range(3)
            ],
        },
        lambda folder: compare(read_run(folder)),
    ),
    "conversations": ({"a.wav": 0.2, "conversations.jsonl": TALKS}, use_conversations),
}
BUCKETS = {"bucket_duration_bins": [[2.0, 10], [4.0, 20]], "bucket_batch_size": [8, 4]}
LABELS = {
    "labels.json": {"method": "ctc"},
    "journal.jsonl": [
        {"id": "a", "segments": [SEGMENT]},
        {"id": "b", "audio": "b", "problem": "damaged"},
    ],
}
AUDIO = ("wav", "flac", "ogg", "mp3", "aiff", "au", "caf", "w64")
FFMPEG_AUDIO = ("m4a", "mka", "wma")
FFMPEG = real_ffmpeg()
SIZES = {"width": 16, "joint": 16}

READERS = {
    "nemo": nemo("ctc", unpack=False),
    **{f"nemo_{kind}": nemo(kind) for kind in ("rnnt", "canary", "hybrid")},
    "nemo_folder": Reader(lambda folder: extract(NEMO / "ctc.nemo", folder), use_nemo),
    "nemo_streaming": Reader(make_nemo_streaming, use_nemo_streaming),
    "huggingface": exported(ctc=True),
    "canary": exported(decoder=DecoderConfig(width=16, layers=1, heads=2, feed_forward=16)),
    "parakeet_rnnt": exported(transducer=TransducerConfig(**SIZES)),
    "parakeet_tdt": exported(transducer=TransducerConfig(**SIZES, durations=(0, 1, 2))),
    "whisper": Reader(
        make_whisper, lambda folder: (use_huggingface(folder), use_tokenizer(folder))
    ),
    "tokenizer_json": Reader(make_tokenizer_json, use_tokenizer),
    "tokenizer_parts": Reader(make_tokenizer_parts, use_tokenizer),
    "tokenizer_own": Reader(lambda folder: own_tokenizer(folder).save(folder), use_tokenizer),
    "tokenizer_nemo": Reader(make_nemo_tokenizer, use_tokenizer),
    "model_directory": Reader(make_model_directory, load_model, ARCHIVE_SLACK),
    # It puts a `latest` right that is damaged.
    "checkpoint": Reader(make_checkpoint, use_checkpoint, writes=True),
    "checkpoint_forged": Reader(make_checkpoint, use_forged_checkpoint, ARCHIVE_SLACK, writes=True),
    "decoding": Reader(
        lambda x: write_decoding(x / "decoding.yaml", DecodingConfig(beam=4), "x"),
        lambda x: DecodingConfig(**read_decoding(x / "decoding.yaml", {})),
    ),
    **{name: Reader(files(contents), use, LINE_SLACK) for name, (contents, use) in LINES.items()},
    "bucket_table": Reader(
        files({"buckets.json": BUCKETS}), lambda folder: BucketTable.load(folder / "buckets.json")
    ),
    "recipe": Reader(
        files({"recipe.yaml": (config.RECIPES / "demo.yaml").read_bytes()}),
        lambda folder: config.load(TrainConfig, folder / "recipe.yaml"),
    ),
    "manifest": Reader(
        MANIFEST_FILES, lambda folder: use_manifest(folder / "manifest.jsonl"), LINE_SLACK
    ),
    "cuts": Reader(make_cuts, use_manifest, LINE_SLACK),
    "shar": Reader(make_shar, use_manifest, LINE_SLACK),
    "nemo_tarred": source("nemo"),
    "webdataset": source("webdataset"),
    "parquet": source("parquet"),
    "saved_to_disk": source("saved to disk"),
    "clips": Reader(make_clips, use_clips, LINE_SLACK),
    **{suffix: audio(suffix) for suffix in AUDIO},
    **{suffix: ffmpeg_audio(suffix, FFMPEG) for suffix in FFMPEG_AUDIO if FFMPEG},
    "kineto": Reader(make_trace, use_captures),
    "nsys": Reader(make_nsys, use_captures),
    "labels": Reader(
        files(LABELS),
        lambda folder: LabelFolder(folder, {"method": "ctc"}).finish(0.4),
        writes=True,
    ),
    "chat_template": Reader(make_chat_template, use_chat_template),
    "language_model": Reader(make_language_model, use_language_model),
    "neural_lm": Reader(make_language_model, use_neural_lm),
    "second_lm": Reader(make_language_model, use_second_lm),
}
