"""Where training keeps what it reads from manifests."""

from dataclasses import replace
from pathlib import Path

import pytest

from effasr.data.config import DataConfig
from effasr.data.index import corpus_cache
from effasr.data.tokenizer import load_tokenizer
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus


@pytest.mark.parametrize("given", ["auto", "named", None])
def test_the_folder(
    tones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
):
    monkeypatch.setattr(corpus_cache, "_LEAST_BYTES", 0)
    tokenizer = load_tokenizer(tones / "tokenizer")
    cache = str(tmp_path / given) if given == "named" else given
    data = DataConfig(train=str(tones / "train.jsonl"), cache=cache)
    config = TrainConfig(data=data, output=str(tmp_path / "runs"))
    folder = {"auto": tmp_path / "runs/.corpus", "named": tmp_path / "named"}.get(given or "")
    first = load_corpus(config, tokenizer, None)
    assert [file.suffix for file in sorted(tmp_path.rglob("*.*")) if file.is_file()] == (
        [] if folder is None else [".corpus", ".lock"]
    )
    assert folder is None or len(list(folder.glob("*.corpus"))) == 1
    # What a run reads to find its budgets is read once.
    wide = replace(config, data=replace(data, frame_budget=1_000_000))
    assert load_corpus(wide, tokenizer, None).fingerprint == first.fingerprint
    assert folder is None or len(list(folder.glob("*.corpus"))) == 1
