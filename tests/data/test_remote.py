"""Corpora in object stores, against a real S3 server with faults."""

import shutil
import ssl
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

from effasr.data.manifest.prepare import prepare
from effasr.untrusted import remote
from tests.support.corpora import load_corpus, make_loader, take_steps
from tests.support.object_store import forget, object_store
from tests.support.sources import SOURCES, make_source


@pytest.fixture
def store(tmp_path):
    with object_store(tmp_path / "cache") as opened:
        yield opened


@pytest.fixture(params=SOURCES)
def source(request, store, nemo, tmp_path):
    """A corpus of seven utterances on disk, and its URL."""
    path = make_source(request.param, nemo(7), tmp_path / "local")
    url = store.upload(tmp_path / "local", "deep/set")
    return path, f"{url}/{path.relative_to(tmp_path / 'local')}".removesuffix("/.")


FEW = ["files", "shar", "nemo sharded", "webdataset texts", "parquet"]


@pytest.mark.representative(source=FEW)
def test_a_remote_corpus_is_the_local_one_sample_by_sample(source, store, tokenizer, tmp_path):
    path, url = source
    local, corpus = (load_corpus(x, tokenizer) for x in (path, remote.localized(url)))
    assert corpus.fingerprint == local.fingerprint
    prepare(remote.localized(url), tmp_path / "out", shards=2)
    prepared = load_corpus(tmp_path / "out" / "shards", tokenizer)
    assert len(corpus) == len(prepared) == len(local) == 7
    for index in (6, 0, 3, 5, 1, 2, 4):
        assert corpus.name(index) == local.name(index)
        for other in (corpus, prepared):
            assert np.array_equal(other.example(index).audio, local.example(index).audio)
    # All of it is in the cache now.
    store.proxy.requests.clear()
    forget()
    again = load_corpus(remote.localized(url), tokenizer)
    assert np.array_equal(again.example(3).audio, local.example(3).audio)
    requests = store.proxy.requests
    assert not [path for method, path in requests if method == "GET" and "?" not in path]


def test_lines_have_urls_in_place_of_the_cache(nemo, store, effasr, tmp_path):
    manifest = make_source("files", nemo(7), tmp_path / "local")
    url = f"{store.upload(tmp_path / 'local', 'set')}/{manifest.name}"
    made = effasr("tokenizer", url, tmp_path / "tokenizer", "--vocab-size", 30)
    assert made.code == 0, made.err
    assert f"next: effasr init {url} --tokenizer" in made.out
    run = remote.local_path(f"{store.url}/runs/mine", "runs")
    assert remote.shown(f"done: {run}; {tmp_path}") == f"done: {store.url}/runs/mine; {tmp_path}"


def test_a_web_server_may_lack_ranges(nemo, tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="needs aiohttp, which s3fs brings")
    monkeypatch.setenv("EFFASR_REMOTE_CACHE", str(tmp_path / "cache"))
    manifest = make_source("files", nemo(7), tmp_path / "files")
    make_source("webdataset", manifest, tmp_path / "tar")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        for name in (f"files/{manifest.name}", "tar/shard-*.tar"):
            local = load_corpus(tmp_path / name, tokenizer)
            corpus = load_corpus(remote.localized(f"{base}/{name}"), tokenizer)
            assert len(corpus) == len(local) == 7
            for index in range(7):
                assert np.array_equal(corpus.example(index).audio, local.example(index).audio)
        with pytest.raises(ValueError, match="is a page of a web server: name a file or a pattern"):
            remote.localized(f"{base}/files")
        server.shutdown()


@pytest.mark.representative(source=["files", "shar"])
def test_faults_lose_and_repeat_nothing(source, store, tokenizer):
    """Every kind of fault, at manifests, tar files and recordings, in two epochs."""
    path, url = source
    faults = ["500", "truncate", "reset", "slow", "500", "truncate", "reset"]
    store.proxy.faults = [("GET", "/set/", fault) for fault in faults]
    store.proxy.faults += [("HEAD", "/set", fault) for fault in ("500", "reset")]
    loaders = []
    for place in (path, remote.localized(url)):
        loader = make_loader(place, tokenizer, micro_batches=1)
        loaders.append(take_steps(loader, loader.count_steps([0, 1])))
    assert not [fault for fault in store.proxy.faults if fault[0] == "GET"]  # patterns need no HEAD
    for expected, step in zip(*loaders, strict=True):
        assert not step.skipped
        assert np.array_equal(expected.indices, step.indices)
        for batch, other in zip(expected.batches, step.batches, strict=True):
            assert all(map(torch.equal, batch.tensors(), other.tensors()))


@pytest.mark.parametrize("fault", ["expired", "500"])
def test_a_shard_that_fails_for_good_is_listed_as_a_broken_file_is(
    fault, store, nemo, tokenizer, tmp_path, monkeypatch
):
    make_source("shar", nemo(7), tmp_path / "local")
    path = remote.localized(store.upload(tmp_path / "local", "set"))
    skipping = make_loader(path, tokenizer, micro_batches=1, on_bad_audio="skip")
    strict = make_loader(path, tokenizer, micro_batches=1)
    monkeypatch.setenv("EFFASR_REMOTE_PATIENCE", "0.2")
    shutil.rmtree(tmp_path / "cache" / "ranges")
    store.proxy.always = {"recording.000001.tar": fault}
    steps = take_steps(skipping, skipping.count_steps([0, 1]))
    skipped = [drop for step in steps for drop in step.skipped]
    assert sorted({drop.id for drop in skipped}) == ["u3", "u4", "u5"]
    for drop in skipped:
        assert f"{store.url}/set/recording.000001.tar" in drop.details
        assert "secret-of-the-test" not in drop.details
        assert ("renew or set the credentials" in drop.details) == (fault == "expired")
    with pytest.raises(ValueError, match=r"data\.on_bad_audio=skip"):
        take_steps(strict, strict.count_steps([0]))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://corpus/gone", "s3://corpus/gone: there is no such file or folder."),
        ("simplecache::s3://corpus/x", "must be of a store or a server"),
        ("file:///etc/passwd", "must be of a store or a server"),
        ("s3://corpus/../x", "must have no empty part"),
        ("https://h/x.json?X-Amz-Signature=secret", "https://h/x.json: a URL must have neither a"),
        ("ftp://me:secret@h/x", "ftp://h/x: a URL must have neither a password nor a query"),
        ("nonsense://x/y", "nonsense://x/y: Protocol not known"),
        ("abfs://x/y", "abfs://x/y: needs another package (Install adlfs"),
    ],
)
def test_urls_that_cannot_be_read(url, message, store):
    with pytest.raises(ValueError, match=r"URL|Protocol|no such file|package") as caught:
        remote.localized(url)
    assert message in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_certificate_that_is_not_trusted_is_named():
    def work() -> None:
        try:
            raise ssl.SSLError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
        except ssl.SSLError as error:
            raise FileNotFoundError("https://h/x") from error  # as fsspec has it

    with pytest.raises(remote.RemoteError, match=r"not trusted: `export SSL_CERT_FILE=ca\.pem`"):
        remote.retried("https://h/x", work)


def test_the_cache_stays_within_its_size(store, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_IN_USE_S", -1.0)
    monkeypatch.setenv("EFFASR_REMOTE_CACHE_GB", "1e-6")
    folder = tmp_path / "local"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.wav").write_bytes(bytes([number]) * 300)
    local = remote.localized(store.upload(folder, "set"))
    for number in (0, 1, 2, 3, 0, 4, 5, 6, 7, 0):
        assert remote.ensure(local / f"{number}.wav")
        assert sum(file.stat().st_size for file in local.iterdir()) <= 900
    # A file that was replaced is downloaded again by the next process.
    (folder / "0.wav").write_bytes(b"new")
    store.upload(folder, "set")
    forget()
    remote.ensure(remote.localized(f"{store.url}/set") / "0.wav")
    assert (local / "0.wav").read_bytes() == b"new"
