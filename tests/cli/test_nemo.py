"""Models of NeMo come in, are trained on, and go out again; see `tests/interop/nemo/make.py`."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from effasr.checkpoint import load_model, resolve

CASES = Path(__file__).parents[1] / "interop" / "nemo"
CLASSES = {
    "ctc": "EncDecCTCModelBPE",
    "hybrid": "EncDecHybridRNNTCTCBPEModel",
    "flash": "EncDecMultiTaskModel",
}
START = re.compile(r"transducer\.predictor\.(embedding\.weight|lstm\.bias_ih_l0)")
"""What changes when a text is made to start from zeros."""


@pytest.mark.parametrize("case", CLASSES)
def test_in_tuned_and_out(effasr, tune, workplace, tmp_path, caplog, case):
    done = effasr("import", CASES / f"{case}.nemo", tmp_path / "model")
    assert done.code == 0, done.err
    assert ("joint.jointnet.dropout = 0.2" in caplog.text) == (case == "hybrid")
    tokenizer = tmp_path / "model" / "tokenizer"
    folders = workplace.folder / "dev", tmp_path / "dev"
    # There is no "p" in these vocabularies.
    checked = effasr("prepare", *folders, "--tokenizer", tokenizer, "--max-unknown", "1")
    assert checked.code == 0, checked.err
    # Short words in many pieces, for CTC.
    limits = "data.filters.max_dropped=1", "data.filters.max_unknown=1"
    run = tune(tmp_path / "model", "finetune", "en", *limits)
    before, after = load_model(tmp_path / "model"), load_model(resolve(run))

    out = effasr("export", run, tmp_path / "out.nemo")
    assert out.code == 0, out.err
    assert f"load it with NeMo's {CLASSES[case]}.restore_from" in out.out
    assert effasr("import", tmp_path / "out.nemo", tmp_path / "back").code == 0
    back = load_model(tmp_path / "back")
    if case == "flash":  # the others are asked nothing
        assert back.prompt == after.prompt
    assert back.tokenizer.vocab_size == before.tokenizer.vocab_size
    again = back.model.state_dict()
    for name, value in after.model.state_dict().items():
        assert torch.equal(again[name], value) or START.fullmatch(name), name


def test_to_hugging_face_its_tokenizer_stays_behind(effasr, tmp_path):
    assert effasr("import", CASES / "flash.nemo", tmp_path / "model").code == 0
    done = effasr("export", tmp_path / "model", tmp_path / "hf")
    assert done.code == 0
    assert "the tokenizer is not exported" in done.err
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_a_tokenizer_of_hugging_face_is_refused(effasr, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"<unk>": 0, "<blank>": 1}, []))
    assert effasr("import", CASES / "ctc.nemo", tmp_path / "model").code == 0
    for file in (tmp_path / "model" / "tokenizer").iterdir():
        file.unlink()
    made.save(str(tmp_path / "model" / "tokenizer" / "tokenizer.json"))
    done = effasr("export", tmp_path / "model", tmp_path / "out.nemo")
    assert "NeMo cannot read a tokenizer.json" in done.error
    assert "--format huggingface" in done.error
    assert not (tmp_path / "out.nemo").exists()


def test_a_folder_may_have_the_nemo_file(effasr, tmp_path):
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "README.md").touch()
    shutil.copy(CASES / "flash.nemo", folder / "canary.nemo")
    assert effasr("import", folder, tmp_path / "model").code == 0
    assert load_model(tmp_path / "model").model.decoder is not None
    (folder / "other.nemo").touch()
    error = effasr("import", folder, tmp_path / "out").error
    assert "must have one .nemo file, but has canary.nemo, other.nemo: name one of them." in error
    assert not (tmp_path / "out").exists()
