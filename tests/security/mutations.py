"""Changes a valid input into a hostile one: bytes, kinds of files, values, archives."""

import gzip
import io
import json
import os
import pickle
import re
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

OUTSIDE = "outside"
"""Folder beside the input, which no reader may change."""

_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**12, 10**400, -(10**9), 0.5, -0.0, 1e308, 1e-308,
    float("nan"), float("inf"), "", "\0", "\ud800", "../outside/secret", "/dev/zero", "/etc/passwd",
    "\x1b[2J", "a" * 100_000, "\u202e", "command", "url", "-1", "nan", "1:" * 50,
    [], {}, [[]], [None], {"": None}, [0] * 1000, {"a": {"a": {"a": {}}}},
)  # fmt: skip
_BINARY = (
    ".wav", ".flac", ".ogg", ".mp3", ".aiff", ".au", ".caf", ".w64", ".m4a", ".mka", ".wma",
    ".model", ".sqlite",
)  # fmt: skip
ALIASES = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)
_LENGTHS = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFF0, 0xFFFFFFFF)


class _Payload:
    """Runs a program when it is unpickled."""

    def __init__(self, target):
        self._target = target

    def __reduce__(self):
        return os.system, (f"touch {self._target}/pwned",)


def mutate(folder, random):
    """Change one or two files of an input; return what was done, for a report."""
    done = []
    for _ in range(random.choice((1, 1, 1, 2))):
        # What a change before has made of a file stays: a link, a pipe, 900 MB.
        files = sorted(
            path
            for path in folder.rglob("*")
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 26
        )
        if files:
            path = random.choice(files)
            done.append(f"{path.name}: {_mutate_file(path, folder, random)}")
    return ", ".join(done)


def _mutate_file(path, folder, random):
    changes: list[tuple[int, Callable[[Path, Path, Random], str]]] = [(3, _bytes), (1, _kind)]
    changes += [(6, change) for change in _for_format(path)]
    weights = [weight for weight, _ in changes]
    return random.choices([change for _, change in changes], weights)[0](path, folder, random)


def _for_format(path):
    with path.open("rb") as file:
        head = file.read(512)
    name = path.name.removesuffix(".gz")
    if name.endswith(".jsonl"):
        return [_json_lines]
    if name.endswith(".json"):
        return [_json]
    if name.endswith((".yaml", ".yml")):
        return [_yaml, _yaml_bomb]
    if name.endswith(".safetensors"):
        return [_safetensors]
    if name.endswith(".jinja"):
        return [_template]
    if name == ".metadata":
        return [_pickle]
    if head[257:262] == b"ustar":
        return [_tar]
    if head[:4] == b"PK\3\4":
        return [_zip]
    if name.endswith(_BINARY):
        return [_lengths]
    return [_words]


def _bytes(path, _, random):
    data = bytearray(path.read_bytes())
    kind = random.choice(("flip", "cut", "insert", "remove", "repeat", "length"))
    if not data:
        return "empty"
    # The beginning has the headers.
    position = random.randrange(min(len(data), random.choice((16, 64, 512, len(data)))))
    if kind == "flip":
        for _bit in range(random.choice((1, 3, 20))):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    elif kind == "cut":
        del data[position:]
    elif kind == "insert":
        data[position:position] = random.randbytes(random.choice((1, 4, 100)))
    elif kind == "remove":
        del data[position : position + random.choice((1, 4, 100))]
    elif kind == "repeat":
        data[position:position] = data[position : position + 100] * random.choice((2, 1000))
    else:
        return _lengths(path, path, random)
    path.write_bytes(data)
    return kind


def _lengths(path, _, random):
    data = bytearray(path.read_bytes())
    place = random.randrange(min(max(1, len(data) - 8), 128))
    order, size = random.choice("<>"), random.choice("IQ")
    data[place : place + struct.calcsize(size)] = struct.pack(
        order + size,
        random.choice(_LENGTHS) << (32 if size == "Q" and random.random() < 0.3 else 0),
    )
    path.write_bytes(data)
    return f"length at {place}"


def _kind(path, folder, random):
    kind = random.choice(
        ("missing", "empty", "folder", "fifo", "secret", "zero", "loop", "sparse", "unreadable")
    )
    path.unlink()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "secret":
        path.symlink_to(folder.parent / OUTSIDE / "secret")
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            # More than a document may have, less than what a process may map here.
            file.truncate(900 << 20)
    elif kind == "unreadable":
        path.write_bytes(b"\xff\xfe\x00")
    return kind


def _hostile(value, random, outside):
    """Return a document with one value changed, at any depth."""
    if isinstance(value, dict | list) and value and random.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = random.choice(keys)
        value = dict(value) if isinstance(value, dict) else list(value)
        if random.random() < 0.08:
            del value[key]
        else:
            value[key] = _hostile(value[key], random, outside)
        return value
    kind = random.random()
    if kind < 0.05:
        return {"type": "command", "channels": [0], "source": f"touch {outside}/pwned"}
    if kind < 0.08:
        return {"type": "url", "channels": [0], "source": f"pipe:touch {outside}/pwned"}
    if kind < 0.12:
        return [value] * 50
    return random.choice(_VALUES)


def _packed(path, text):
    data = text.encode("utf-8", "surrogatepass")
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)


def _unpacked(path):
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error):
        return ""


def _json_text(text, random, outside):
    kind = random.random()
    if kind < 0.04:
        depth = random.choice((65, 1000, 100_000))
        return random.choice(('{"a":' * depth + "1" + "}" * depth, "[" * depth))
    if kind < 0.07:
        return text.replace("{", '{"text": 1, "text": 2, "id": 3, "id": 4,', 1)
    try:
        return json.dumps(_hostile(json.loads(text), random, outside))
    except (ValueError, RecursionError):
        return text


def _other_source(text, random, folder):
    """Return a cut or recording with another audio source, or one more; None if it is neither."""
    try:
        row = json.loads(text)
        recording = row.get("recording", row)
        sources = recording["sources"]
        first = dict(sources[0])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    pipe, sparse = folder / "pipe", folder / "sparse"
    if not pipe.exists():
        os.mkfifo(pipe)
        sparse.touch()
        os.truncate(sparse, 900 << 20)
    place = random.choice((str(pipe), str(sparse), "/dev/zero", "/dev/tty", first.get("source")))
    begin, end = random.choice(((0, 10), (0, 700_000_000), (0, 10**12), (10**12, 10**13), (9, 5)))
    source = first | random.choice(
        ({"type": "shar", "source": f"{place}[{begin}:{end}]"}, {"type": "file", "source": place})
    )
    if random.random() < 0.5:
        sources[0] = source
    else:
        sources.append(source | {"channels": [1]})
        row.update({"type": "MultiCut", "channel": [0, 1]} if "recording" in row else {})
        recording["channel_ids"] = [0, 1]
    return json.dumps(row)


def _json(path, folder, random):
    _packed(path, _json_text(_unpacked(path), random, folder.parent / OUTSIDE))
    return "json"


def _json_lines(path, folder, random):
    lines = _unpacked(path).splitlines() or [""]
    if path.suffix == ".gz" and random.random() < 0.03:
        path.write_bytes(gzip.compress(b" " * (64 << 20), 9))
        return "gzip bomb"
    position = random.randrange(len(lines))
    if random.random() < 0.1 and (text := _other_source(lines[position], random, folder)):
        lines[position] = text
        _packed(path, "\n".join(lines) + "\n")
        return "audio source"
    lines[position] = _json_text(lines[position], random, folder.parent / OUTSIDE)
    _packed(path, "\n".join(lines) + "\n")
    return "json line"


def _yaml(path, folder, random):
    text = _unpacked(path)
    if "<<" in text:
        # A bomb of merges, from a change before, would go off here.
        return "damaged before"
    try:
        content = yaml.safe_load(text)
        path.write_text(yaml.safe_dump(_hostile(content, random, folder.parent / OUTSIDE)))
    except (ValueError, LookupError, RecursionError, yaml.YAMLError):
        pass
    return "yaml value"


def _yaml_bomb(path, folder, random):
    bombs = {
        "aliases": ALIASES,
        "merges": MERGES,
        "itself": "a: &a [*a]\n",
        "merges itself": "a: &a {<<: *a}\n",
        "depth": "a: " + "[" * 5000 + "\n",
        "program": f"!!python/object/apply:os.system ['touch {folder.parent / OUTSIDE}/pwned']\n",
        "base 60": "a: 1" + ":1" * 50_000 + "\n",
        "digits": f"a: {'9' * 5000}\n",
        "date": "a: 2001-99-99\n",
        "tags": random.choice(
            ("a: !!int ''\n", "a: !!bool x\n", "a: !!binary x\n", "a: !!set [1]\n")
        ),
        "key": "? [1, 2]\n: 3\n",
        "twice": "a: 1\na: 2\n",
        "documents": "--- 1\n--- 2\n",
    }
    kind = random.choice(sorted(bombs))
    # Beside what is valid, so that readers come to it.
    path.write_text((_unpacked(path) if random.random() < 0.5 else "") + bombs[kind])
    return f"yaml {kind}"


def _safetensors(path, folder, random):
    data = path.read_bytes()
    if len(data) < 8:
        return "nothing"
    size = int.from_bytes(data[:8], "little")
    if random.random() < 0.2:
        path.write_bytes(struct.pack("<Q", random.choice((2**63, 2**32, 10**8, 0))) + data[8:])
        return "length of the header"
    header = _json_text(
        data[8 : 8 + size].decode(errors="replace"), random, folder.parent / OUTSIDE
    )
    encoded = header.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + size :])
    return "header"


def _tar(path, folder, random):
    try:
        with tarfile.open(path) as tar:
            entries = [(info, tar.extractfile(info)) for info in tar if info.isreg()]
            files = [(info, source.read()) for info, source in entries if source is not None]
    except (tarfile.TarError, EOFError, OSError, zlib.error, ValueError, MemoryError):
        return "damaged before"
    if not files:
        return "empty"
    kind = random.choice(
        ("name", "type", "inner", "bomb", "many", "twice", "order", "pax", "huge", "long")
    )
    position = random.randrange(len(files))
    info, content = files[position]
    if kind == "name":
        name = str(folder.parent / OUTSIDE / "pwned")
        info.name = random.choice(
            (name, "../outside/pwned", "./../../x", "a/b", "", "x" * 5000, ".")
        )
    elif kind == "type":
        info.type = random.choice(
            (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)
        )
        info.linkname, info.size, content = str(folder.parent / OUTSIDE / "secret"), 0, b""
    elif kind == "inner":
        inner = folder / Path(info.name).name
        if inner.exists():
            return "nothing"
        inner.write_bytes(content)
        _mutate_file(inner, folder, random)
        regular = inner.is_file() and not inner.is_symlink()
        if regular and inner.stat().st_size < 1 << 26:
            content = inner.read_bytes()
        _remove(inner)
    elif kind == "bomb":
        content = bytes(64 << 20)
    elif kind == "twice":
        files.append((info, content))
    elif kind == "order":
        random.shuffle(files)
        position = files.index((info, content))
    elif kind == "pax":
        info.pax_headers = {"size": "99999999999", "path": "../outside/pwned"}
    elif kind == "huge":
        info.size = random.choice((1 << 33, 1 << 40))
    if kind != "huge":
        info.size = len(content)
    files[position] = info, content
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        if kind == "long":
            # tarfile reads the content of these headers at once.
            header = tarfile.TarInfo("long")
            header.type = random.choice((b"L", b"K", b"x", b"g"))
            header.size = random.choice((1 << 31, 1 << 42))
            tar.fileobj.write(header.tobuf(tarfile.GNU_FORMAT))
        for item, data in files:
            tar.fileobj.write(item.tobuf(tarfile.PAX_FORMAT))
            tar.fileobj.write(data + bytes(-len(data) % 512))
        if kind == "many":
            for number in range(3000):
                tar.addfile(tarfile.TarInfo(str(number)))
    packed = kind == "bomb" or random.random() < 0.2
    path.write_bytes(
        gzip.compress(out.getvalue(), 9 if kind == "bomb" else 1) if packed else out.getvalue()
    )
    return f"tar {kind}"


def _remove(path):
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _zip(path, folder, random):
    """Change a file of ``torch.save``."""
    try:
        with zipfile.ZipFile(path) as file:
            parts = {info.filename: file.read(info) for info in file.infolist()}
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, NotImplementedError, RuntimeError):
        return "damaged before"
    kind = random.choice(("program", "bomb", "missing", "bytes", "names", "plain pickle"))
    name = random.choice(sorted(parts))
    pickled = next((item for item in parts if item.endswith("data.pkl")), name)
    if kind == "program":
        parts[pickled] = pickle.dumps({"a": _Payload(folder.parent / OUTSIDE)}, protocol=2)
    elif kind == "plain pickle":
        path.write_bytes(pickle.dumps({"a": _Payload(folder.parent / OUTSIDE)}, protocol=2))
        return kind
    elif kind == "bomb":
        parts[name] += bytes(64 << 20)
    elif kind == "missing":
        del parts[name]
    elif kind == "bytes" and parts[pickled]:
        data = bytearray(parts[pickled])
        for _ in range(random.choice((1, 1, 4))):
            data[random.randrange(len(data))] = random.randrange(256)
        parts[pickled] = bytes(data)
    elif kind == "names":
        parts["../outside/pwned"] = parts.pop(name)
    method = zipfile.ZIP_DEFLATED if kind == "bomb" else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", method) as file:
        for part, data in parts.items():
            file.writestr(part, data)
    return f"zip {kind}"


def _pickle(path, folder, random):
    """Change a value of a pickle, or let it run a program."""
    kind = random.choice(("program", "program within", "bytes", "bytes", "name", "size"))
    data, payload = path.read_bytes(), _Payload(folder.parent / OUTSIDE)
    if kind == "program":
        data = pickle.dumps({"a": payload}, protocol=2)
    elif kind == "program within":
        # Without the head and the end, as a value that is put away.
        data = data[:2] + pickle.dumps(payload, protocol=2)[2:-1] + b"0" + data[2:]
    elif kind == "bytes" and data:
        changed = bytearray(data)
        for _ in range(random.choice((1, 1, 4))):
            changed[random.randrange(len(changed))] = random.randrange(256)
        data = bytes(changed)
    elif kind == "name":
        # Of the same length, as the length is written before it.
        name = random.choice(sorted(set(re.findall(rb"[A-Za-z_.0-9]{5,}", data))) or [b""])
        data = data.replace(name, random.choice((b"../" + name[3:], b"/" + name[1:], name[::-1])))
    else:
        # K and a byte is an integer below 256, J and four bytes any other of 32 bits.
        places = [result.start() for result in re.finditer(rb"K.", data, re.DOTALL)] or [0]
        position, value = random.choice(places), random.choice((-1, 1 << 30, 2**31 - 1))
        data = data[:position] + b"J" + struct.pack("<i", value) + data[position + 2 :]
    path.write_bytes(data)
    return f"pickle {kind}"


def _words(path, folder, random):
    """Change a word of a text: a field of CSV, Kaldi or ARPA."""
    # Words and what is between them.
    words = re.split(r"(\s+)", _unpacked(path))
    values = (
        "nan", "-1", "1e400", "", "\0", '"', "9" * 5000, f"touch {folder.parent / OUTSIDE}/pwned |",
        "../outside/secret", "/dev/zero", "\x1b[2J", "\\99-grams:", "ngram 1=99999999999999999999",
        "inf", "-inf", ",", "x" * 200_000, "\u2028", "a.wav\na.wav", "\r",
    )  # fmt: skip
    words[random.randrange(len(words))] = random.choice(values)
    _packed(path, "".join(words))
    return "word"


def _template(path, _, random):
    """Add something to a Jinja template, between two statements or within one."""
    text = _unpacked(path)
    added = (
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "{% include '/etc/passwd' %}",
        "{{ messages.__class__.__mro__ }}", "{{ raise_exception('no') }}", "{{ cycler.__init__ }}",
        "{{ messages.append(1) }}", "{{ 'x' * 5000000 }}", "(" * 5000, "{%", "\0", "\u202e",
        "{% generation %}", "{{ none.x }}",
    )  # fmt: skip
    places = [0, len(text), *(result.start() for result in re.finditer(r"\{|\}|\s", text))]
    position = random.choice(places)
    _packed(path, text[:position] + random.choice(added) + text[position:])
    return "template"
