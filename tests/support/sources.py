"""The corpus of a NeMo manifest in other containers: tar files and tables."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

from effasr.data.manifest.reader import read
from tests.support.corpora import read_lines, write_lines

SHARDS = 2


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def shards(manifest: Path) -> list[list[tuple[Path, dict]]]:
    """Return the audio files of a manifest with their lines, in order, for each shard."""
    rows = [(manifest.parent / row["audio_filepath"], row) for row in read_lines(manifest)]
    size = -(-len(rows) // SHARDS)
    return [rows[first : first + size] for first in range(0, len(rows), size)]


def nemo_tarred(manifest: Path, folder: Path, *, sharded: bool = False) -> Path:
    lines = []
    for number, rows in enumerate(shards(manifest)):
        with tarfile.open(folder / f"audio_{number}.tar", "w") as tar:
            for path, row in rows:
                add(tar, path.name, path.read_bytes())
                lines.append(row | {"audio_filepath": path.name, "shard_id": number})
    if not sharded:
        write_lines(folder / "tarred_audio_manifest.json", lines)
        return folder
    for number in range(SHARDS):
        part = [line for line in lines if line["shard_id"] == number]
        write_lines(folder / f"sharded_manifests/manifest_{number}.json", part)
    return folder / f"sharded_manifests/manifest__OP_0..{SHARDS - 1}_CL_.json"


def web_dataset(manifest: Path, folder: Path) -> Path:
    for number, rows in enumerate(shards(manifest)):
        with tarfile.open(folder / f"shard-{number:06}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for path, row in rows:
                add(tar, path.name, path.read_bytes())
                fields = {"transcript": row["text"], "language": row.get("lang", "en")}
                add(tar, f"{path.stem}.json", json.dumps(fields).encode())
    return folder


def web_dataset_of_texts(manifest: Path, folder: Path) -> Path:
    """Texts before all audio, in folders, as GNU tar packs a corpus."""
    for number, rows in enumerate(shards(manifest)):
        with tarfile.open(folder / f"a-{number:02}.tar", "w", format=tarfile.GNU_FORMAT) as tar:
            for path, row in rows:
                add(tar, f"./txt/{'x' * 120}/{path.stem}.txt", row["text"].encode())
                add(tar, f"./txt/{'x' * 120}/._{path.stem}.wav", b"resource fork")
            for path, _ in rows:
                add(tar, f"./txt/{'x' * 120}/{path.name}", path.read_bytes())
    return folder / f"a-{{00..{SHARDS - 1:02}}}.tar"


def parquet(manifest: Path, folder: Path, *, linked: bool = False) -> Path:
    """Two files of two row groups each."""
    import pyarrow as pa
    from pyarrow import parquet as pq

    for number, rows in enumerate(shards(manifest)):
        audio = pa.array(
            [{"bytes": None, "path": str(path)} if linked else
             {"bytes": path.read_bytes(), "path": path.name} for path, _ in rows],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        )  # fmt: skip
        texts = pa.array([row["text"] for _, row in rows], pa.large_string()).dictionary_encode()
        languages = pa.array([row.get("lang", "en") for _, row in rows])
        table = pa.table({"audio": audio, "sentence": texts, "language": languages})
        path = folder / f"train-{number:05}-of-{SHARDS:05}.parquet"
        pq.write_table(table, path, row_group_size=6)
    return folder


def saved_to_disk(manifest: Path, folder: Path) -> Path:
    """As `save_to_disk` writes it."""
    import pyarrow as pa

    names = [f"data-{number:05}-of-{SHARDS:05}.arrow" for number in range(SHARDS)]
    for name, rows in zip(names, shards(manifest), strict=True):
        cells = [{"bytes": path.read_bytes(), "path": path.name} for path, _ in rows]
        columns = {"audio": cells, "text": [row["text"] for _, row in rows]}
        table = pa.table(columns)
        with pa.ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def shar(manifest: Path, folder: Path) -> Path:
    read(manifest).to_shar(str(folder), fields={"recording": "flac"}, shard_size=3)
    return folder


def files(manifest: Path, folder: Path) -> Path:
    return shutil.copytree(manifest.parent, folder, dirs_exist_ok=True) / manifest.name


SOURCES: dict[str, Callable[[Path, Path], Path]] = {
    "files": files,
    "nemo": nemo_tarred,
    "nemo sharded": lambda manifest, folder: nemo_tarred(manifest, folder, sharded=True),
    "webdataset": web_dataset,
    "webdataset texts": web_dataset_of_texts,
    "parquet": parquet,
    "parquet of paths": lambda manifest, folder: parquet(manifest, folder, linked=True),
    "saved to disk": saved_to_disk,
    "shar": shar,
}


def make_source(name: str, manifest: Path, folder: Path) -> Path:
    """Write the corpus of a manifest of JSON lines in another form; the path is what names it."""
    folder.mkdir()
    return SOURCES[name](manifest, folder)
