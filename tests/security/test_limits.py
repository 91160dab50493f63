"""Findings, each as it was: what ran a program, took memory or left its folder."""

import gzip
import io
import json
import os
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    StorageMeta,
)

from effasr.checkpoint import CheckpointError, load_model, load_weights
from effasr.checks import LIMITS
from effasr.config import _Loader
from effasr.data.audio.augmentation.augmenter import Clips
from effasr.data.audio.waveform import AudioError, load_audio
from effasr.data.features.config import FeatureConfig
from effasr.data.manifest.lines import numbered_lines, parse_object
from effasr.data.manifest.reader import read
from effasr.data.tokenizer import load_tokenizer
from effasr.distributed import tensor_files
from effasr.interop.huggingface.files import read_weights
from effasr.interop.nemo.archive import CONFIG, WEIGHTS, read_archive
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.decoder import DecoderConfig
from effasr.model.encoder import FastConformerConfig
from effasr.model.transducer import TransducerConfig
from effasr.nn.experts import ExpertsConfig
from effasr.transcription.inputs.audio_stream import open_stream
from effasr.untrusted import files
from effasr.untrusted.documents import dump_yaml, parse_json, parse_yaml
from effasr.untrusted.tensors import is_honest, load_tensors
from tests.security.mutations import ALIASES, MERGES


def cut(source, **more):
    recording = {
        "id": "r", "sources": [{"channels": [0], **source}], "sampling_rate": 16_000,
        "num_samples": 1600, "duration": 0.1, **more,
    }  # fmt: skip
    supervision = {"id": "s", "recording_id": "r", "start": 0.0, "duration": 0.1, "text": "a"}
    return {
        "id": "c", "type": "MonoCut", "start": 0.0, "duration": 0.1, "channel": 0,
        "supervisions": [supervision], "recording": recording,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "prefix"), [("command", ""), ("url", "pipe:"), ("url", "http://x/")]
)
def test_no_source_of_a_cut_is_run_or_downloaded(tmp_path, kind, prefix):
    row = cut({"type": kind, "source": f"{prefix}touch {tmp_path}/pwned"})
    impulse = {"name": "ReverbWithImpulseResponse", "kwargs": {"rir": row["recording"]}}
    inner = cut({"type": "file", "source": "a.wav"}, transforms=[impulse])
    # The same letters, spelt another way.
    spelt = json.dumps(row).replace(f'"{kind}"', f'"\\u00{ord(kind[0]):x}{kind[1:]}"')
    for text in (json.dumps(row), json.dumps(inner), spelt):
        (tmp_path / "cuts.jsonl").write_text(text + "\n")
        with pytest.raises(ValueError, match="must be of type file, memory, shar"):
            read(tmp_path / "cuts.jsonl")
        with pytest.raises(ValueError, match="must be of type file, memory, shar"):
            Clips.load([tmp_path / "cuts.jsonl"], "noise")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("kind", ["MonoCut", "MixedCut", "PaddingCut"])
def test_no_shell_gets_the_name_of_a_file(tmp_path, kind):
    """lhotse reads these of several channels, and as tracks of a mixed cut."""
    row = cut({"type": "file", "source": f"$(touch {tmp_path}/pwned).sph"})
    if kind == "MonoCut":
        other = {"type": "file", "channels": [1], "source": "b.sph"}
        row["recording"]["sources"].append(other)
    else:
        row = {"id": "m", "type": kind, "tracks": [{"cut": row, "type": "MonoCut"}]}
    (tmp_path / "cuts.jsonl").write_text(json.dumps(row) + "\n")
    for load in (read, lambda path: Clips.load([path], "noise")):
        if kind != "MonoCut" or load is read:
            with pytest.raises(ValueError, match="lhotse reads these with other programs"):
                load(tmp_path / "cuts.jsonl")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("fifo[0:10]", "a pipe, a device or a socket"),
        ("/dev/zero[0:700000000]", "a pipe, a device or a socket"),
        ("a.tar[0:1000000000000]", "must have at most 4294967296 bytes"),
        ("a.tar[0:4000000000]", "the tar file ends before"),
        ("a.tar[10:5]", "the tar file ends before"),
        ("fifo[row 0, column 0]", "must be a regular"),
        ("a.tar[row 9, column 9]", "cannot be read as a table"),
    ],
)
def test_a_place_in_a_tar_lies_in_a_regular_file(tmp_path, place, message):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "a.tar").write_bytes(bytes(1024))
    row = cut({"type": "shar", "source": str(tmp_path / place)})
    (tmp_path / "cuts.jsonl").write_text(json.dumps(row) + "\n")
    clips = Clips.load([tmp_path / "cuts.jsonl"], "noise")
    with pytest.raises(AudioError, match=message):
        load_audio(read(tmp_path / "cuts.jsonl")[0])
    with pytest.raises(AudioError, match=message):
        clips.read(0)


@pytest.mark.timeout(30)
def test_files_that_lhotse_reads_are_regular_ones(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    soundfile.write(tmp_path / "a.wav", np.zeros(1600, np.float32), 16_000)
    row = cut({"type": "file", "source": "a.wav"})
    row |= {"type": "MultiCut", "channel": [0, 1]}
    sources = row["recording"]["sources"]
    sources.append({"type": "file", "channels": [1], "source": "a.wav"})
    path = tmp_path / "cuts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    assert load_audio(read(path)[0]).shape == (1600,)
    sources[1]["source"] = "fifo"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(AudioError, match="not a file but a pipe or a device"):
        load_audio(read(path)[0])
    with pytest.raises(ValueError, match="not a file but a pipe or a device"):
        Clips.load([path], "noise")
    # lhotse would make 16,000 samples of each.
    sources[1]["source"] = "a.wav"
    row["recording"] |= {"sampling_rate": 1, "duration": 1600.0}
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(AudioError, match="`sampling_rate` must be from 1 kHz to 1 MHz, but is 1"):
        load_audio(read(path)[0])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_a_header_of_a_shard_that_claims_more_than_there_is(tmp_path, kind):
    (tmp_path / "cuts.000000.jsonl").write_text("")
    info = tarfile.TarInfo("long")
    info.type, info.size = kind, 1 << 42
    (tmp_path / "recording.000000.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(ValueError, match="a header in it claims 4398046511104 bytes"):
        read(tmp_path)


def test_pipes_and_devices_are_not_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "linked").symlink_to(__file__)
    for name in ("fifo", "zero"):
        with pytest.raises(ValueError, match="a pipe, a device or a socket"):
            files.read_bytes(tmp_path / name)
    assert files.read_bytes(tmp_path / "linked") == Path(__file__).read_bytes()
    with pytest.raises(ValueError, match="at most 10 bytes"):
        files.read_bytes(tmp_path / "linked", 10)


@pytest.mark.timeout(30)
def test_weights_that_are_a_pipe_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a pipe, a device or a socket"):
        load_weights(torch.nn.Linear(1, 1), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", "a/b", "..", "", "a\0", None, 3])
def test_names_stay_in_their_folder(name):
    with pytest.raises(ValueError, match="in the same folder"):
        files.plain_name(name, "it")


def test_a_shard_lies_beside_its_index(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    index = {"weight_map": {"a": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="in the same folder"):
        read_weights(folder)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_yaml, ALIASES, "aliases stand for"),
        (parse_yaml, MERGES, "aliases stand for"),
        (parse_yaml, "a: &a [*a]", "contains itself"),
        (parse_yaml, "a: " + "[" * 100 + "]" * 100, "nested at most 64"),
        (parse_yaml, "a: " + "[" * 100_000, "nested too deep"),
        (parse_yaml, "a: 1" + ":1" * 50_000, "a number has"),
        (parse_yaml, "a: 1\na: 2", "'a' appears twice"),
        (parse_yaml, "a: 2001-99-99", "not valid YAML"),
        (parse_yaml, "a: !!int ''", "not valid YAML"),
        (parse_yaml, "a: !!bool x", "not valid YAML"),
        (parse_yaml, "!!python/object/apply:os.getcwd []", "not valid YAML"),
        (parse_json, "[" * 100 + "]" * 100, "nested at most 64"),
        (parse_json, "[" * 100_000, "not valid JSON"),
        (parse_json, '{"a": {"b": 1, "b": 2}}', "'b' appears twice"),
        (parse_json, "9" * 5000, "not valid JSON"),
    ],
)
def test_documents_are_plain_and_bounded(parse, text, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(text, "x.file")
    assert str(error.value).startswith("x.file")
    assert "\n" not in str(error.value)


def test_yaml_keeps_honest_aliases_and_merges():
    text = "base: &base {a: 1, b: [1, 2]}\nother: {<<: *base, a: 2}\nlist: [*base, *base]"
    assert parse_yaml(text, "x") == yaml.safe_load(text)


def test_lines_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("effasr.data.manifest.lines.LINE_BYTES", 1000)
    monkeypatch.setattr("effasr.data.manifest.lines._UNPACKED_BYTES", 10_000)
    (tmp_path / "long").write_text("a" * 999 + "\n" + "a" * 1000 + "\n")
    with pytest.raises(ValueError, match="long:2: a line must have at most 1000 bytes"):
        list(numbered_lines(tmp_path / "long"))
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\n" * 10_000_000))
    with pytest.raises(ValueError, match="unpacks to more than 300 times"):
        list(numbered_lines(tmp_path / "bomb.gz"))
    with pytest.raises(ValueError, match="nested at most 64 deep"):
        parse_object('{"a":' * 100 + "1" + "}" * 100, "x:1")


def nemo(path, *members, packed=False):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, size, content in members:
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(content)) if size == len(content) else out.write(
                info.tobuf() + content
            )
    path.write_bytes(gzip.compress(out.getvalue()) if packed else out.getvalue())
    return path


def test_an_archive_unpacks_to_what_a_model_of_its_size_holds(tmp_path, monkeypatch):
    monkeypatch.setattr("effasr.interop.nemo.archive._MOST_BYTES", 1 << 20)
    zeros = bytes(30 << 20)
    bomb = nemo(tmp_path / "bomb.nemo", (WEIGHTS, len(zeros), zeros), packed=True)
    with pytest.raises(ValueError, match="than a file of its size can hold"):
        read_archive(bomb)
    many = nemo(tmp_path / "many.nemo", *((f"f{n}", 1, b"x") for n in range(30)))
    monkeypatch.setattr("effasr.interop.nemo.archive._MOST_SMALL_BYTES", 20)
    with pytest.raises(ValueError, match="at most 20 bytes beside its weights"):
        read_archive(many)
    monkeypatch.setattr("effasr.interop.nemo.archive._MOST_MEMBERS", 10)
    with pytest.raises(ValueError, match="at most 10 files"):
        read_archive(many)
    claim = nemo(tmp_path / "claim.nemo", (CONFIG, 1 << 40, b"a: 1"))
    with pytest.raises(ValueError, match=r"claim.nemo must be a .nemo file"):
        read_archive(claim)


class _Program:
    def __init__(self, target):
        self._target = target

    def __reduce__(self):
        return os.system, (f"touch {self._target}",)


def _rewrite(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def stored(tmp_path):
    tensor_files.write({"a": torch.arange(3.0)}, tmp_path / "training")
    assert torch.equal(tensor_files.read_whole(tmp_path / "training")["a"], torch.arange(3.0))
    return tmp_path / "training"


class _Attribute:
    """A pickle that calls getattr, as members of enumerations did before Python 3.11.4."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_metadata_may_name_a_memory_format_as_older_pythons_did(stored, monkeypatch):
    by_name = lambda member, protocol: (getattr, (type(member), member.name))
    with monkeypatch.context() as patch:
        patch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
        _rewrite(stored, lambda metadata: None)
    assert b"getattr" in (stored / ".metadata").read_bytes()
    assert torch.equal(tensor_files.read_whole(stored)["a"], torch.arange(3.0))
    attribute = _Attribute(torch.Size, "__init__")
    _rewrite(stored, lambda metadata: setattr(metadata, "planner_data", attribute))
    with pytest.raises(ValueError, match=r"\.metadata is damaged: it names an attribute"):
        tensor_files.describe(stored)


def test_metadata_of_a_checkpoint_run_no_program(stored, tmp_path):
    program = _Program(tmp_path / "pwned")
    _rewrite(stored, lambda metadata: setattr(metadata, "planner_data", program))
    with pytest.raises(ValueError, match=r"\.metadata is damaged: it names posix\.system"):
        tensor_files.describe(stored)
    assert not (tmp_path / "pwned").exists()


def test_tensors_of_a_checkpoint_run_no_program(stored, tmp_path):
    payload = pickle.dumps(_Program(tmp_path / "pwned"), protocol=2)
    (stored / "__0_0.distcp").write_bytes(payload + bytes(2000))
    message = "holds damaged tensors: Weights only load failed"
    with pytest.raises(ValueError, match=message) as error:
        tensor_files.read_whole(stored)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "pwned").exists()


def _file(name):
    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    return change


def _entry(value):
    return lambda metadata: metadata.state_dict_metadata.update(a=value)


def _large(metadata):
    metadata.state_dict_metadata["a"].size = torch.Size([1 << 40])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # The planner of torch unpickles these without limits.
        (_entry(BytesStorageMetadata()), "names .*BytesStorageMetadata"),
        (_entry(StorageMeta()), "'a' is no tensor"),
        (_file("../other"), "must be the name of a file in the same folder, but is '../other'"),
        (_file("missing"), "No such file.*missing"),
        (_file("fifo"), "a pipe, a device or a socket"),
        (_large, "claims 4398046511104 bytes in files of"),
    ],
)
def test_tensors_of_a_checkpoint_lie_in_its_files(stored, change, message):
    os.mkfifo(stored / "fifo")
    _rewrite(stored, change)
    with pytest.raises((ValueError, OSError), match=message):
        tensor_files.read_whole(stored)


def test_weights_hold_what_they_claim(tmp_path):
    wide = torch.zeros(1).expand(1 << 40)
    assert not is_honest(wide)
    assert is_honest(torch.zeros(3, 4).T)
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain")
    with (
        zipfile.ZipFile(tmp_path / "plain") as plain,
        zipfile.ZipFile(tmp_path / "packed", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    assert load_tensors(tmp_path / "plain")["a"].shape == (1 << 20,)
    with pytest.raises(ValueError, match="must not be compressed"):
        load_tensors(tmp_path / "packed")


TEXT = st.one_of(
    st.text(max_size=12),
    st.text("0123456789eE+-._:xob \x85\u2028\u2029\n\t#'\"", max_size=8),
    st.sampled_from(["1e5", "+1E-3", "1.e5", "1_0e3", "null", "yes", "2024-01-01", "<<", "=", "~"]),
)


@given(key=TEXT, texts=st.lists(TEXT, max_size=3))
@example(key="\x85", texts=["a\x85b", "é\u2028\n"])
def test_texts_are_read_as_they_were(key, texts):
    document = {"b": texts, "a": {key: key}}
    for loader in (yaml.SafeLoader, _Loader):
        result = yaml.load(dump_yaml(document), loader)
        assert result == document
        assert list(result) == ["b", "a"]


@pytest.mark.parametrize("pattern", [r"(!+)+$", r"(?:!|!!)+$"])
@pytest.mark.parametrize("place", ["pre_tokenizer", "normalizer", "decoder"])
def test_a_text_that_takes_exponential_time_is_refused(tmp_path, pattern, place):
    tokenizers = pytest.importorskip("tokenizers")
    regex, long = tokenizers.Regex(pattern), "!" * 5000 + "a"
    words = {long: 0, "a": 1, "<unk>": 2, "<pad>": 3}
    saved = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    part = {
        "normalizer": lambda: tokenizers.normalizers.Replace(regex, "a"),
        "pre_tokenizer": lambda: tokenizers.pre_tokenizers.Split(regex, "isolated"),
        "decoder": lambda: tokenizers.decoders.Replace(regex, "a"),
    }[place]
    setattr(saved, place, part())
    saved.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a", "en") == [1]
    assert tokenizer.decode([1]) == "a"
    with pytest.raises(ValueError, match="retry-limit-in-match over") as failure:
        tokenizer.decode([0]) if place == "decoder" else tokenizer.encode(long, "en")
    assert "\n" not in str(failure.value)


HUGE = 2_000_000_000


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("part", "field", "options"),
    [
        *(("features", name, {}) for name in ("sample_rate", "hop", "n_fft", "mel_bins")),
        ("features", "minimum_s", {"kind": "whisper", "preemphasis": 0.0, "normalize": False}),
        *(("encoder", name, {}) for name in ("layers", "max_frames", "feed_forward")),
        *(("decoder", name, {}) for name in ("layers", "max_positions", "feed_forward")),
        *(("transducer", name, {}) for name in ("layers", "context", "joint")),
        ("decoder.experts", "count", {}),
    ],
)
def test_every_size_of_a_model_has_a_limit(part, field, options):
    kinds = {
        "features": FeatureConfig,
        "encoder": FastConformerConfig,
        "decoder": DecoderConfig,
        "transducer": TransducerConfig,
        "decoder.experts": ExpertsConfig,
    }
    options = options | ({"window": 512} if options else {})
    config = kinds[part](**{field: HUGE}, **options)
    name, _, inner = part.partition(".")
    if inner:
        config = DecoderConfig(**{inner: config})
    with pytest.raises(ValueError, match=rf"`{part}\.{field}` must be at most \d+, but is {HUGE}"):
        ModelConfig(**{name: config})


def test_a_model_directory_with_a_huge_size_is_refused(tmp_path):
    text = f"model: {{decoder: {{max_positions: {HUGE}}}}}\nvocab_size: 8\n"
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"`decoder\.max_positions` must be at most"):
        load_model(tmp_path)


def test_many_positions_have_no_table():
    small = DecoderConfig(width=8, layers=1, heads=1, feed_forward=8, max_positions=64)
    large = DecoderConfig(
        width=8, layers=1, heads=1, feed_forward=8, max_positions=LIMITS["max_positions"]
    )
    encoder = FastConformerConfig(width=8, layers=1, heads=1, feed_forward=8)
    tokens, positions = torch.arange(5), torch.tensor([0, 1, 2, 62, 63])
    outputs = []
    for config in (small, large):
        torch.manual_seed(0)
        decoder = ASRModel(ModelConfig(encoder=encoder, decoder=config), 8).decoder
        assert decoder is not None
        outputs.append(decoder.embed(tokens, positions))
        rows = [len(table) for table in decoder._tables._tables.values()]
        assert sum(rows) <= 64
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("value", ["{}", "[]", '""', '{"a":0}', "0"])
def test_values_of_json_are_counted_before_they_are_made(value):
    text = '{"a": [' + ",".join([value] * 4_000_000) + "]}"
    for parse in (parse_json, parse_object):
        with pytest.raises(ValueError, match=r"^x must have at most 4000000 values"):
            parse(text, "x")
    several = json.loads(f"[{value}, {value}]")
    assert parse_object(json.dumps({"a": several}), "x") == {"a": several}


def test_blocks_of_many_channels_are_small(tmp_path):
    """At 1 MHz, ten seconds of 255 channels are 10 GB."""
    samples = np.zeros((20_000, 255), np.int16)
    samples[:, 0] = np.arange(20_000)
    soundfile.write(tmp_path / "a.wav", samples, 1_000_000)
    blocks = list(open_stream(tmp_path / "a.wav", 1_000_000).blocks)
    assert max(map(len, blocks)) * 255 <= 1 << 20
    expected = (np.arange(20_000) / 2**15 / 255).astype(np.float32)
    np.testing.assert_allclose(np.concatenate(blocks), expected, atol=1e-6)
