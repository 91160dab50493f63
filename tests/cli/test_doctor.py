import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch

from effasr.cli.installation import report as doctor
from effasr.cli.installation.report import recipe_rows
from effasr.cli.main import main
from effasr_kernels import OPERATIONS, Backend
from effasr_kernels.runtime import native


@pytest.fixture(scope="module")
def found():
    return doctor.report()


def _row(report, name):
    (row,) = [row for row in report.rows if row.name == name]
    return row


def test_every_operation_can_run_on_the_cpu(found):
    rows = [row for row in found.rows if row.name.endswith(" on cpu")]
    labels = {f"{x.label} on cpu" for op in OPERATIONS.values() for x in op.examples}
    assert {row.name for row in rows} == labels
    assert len(rows) == len(labels)
    assert {row.value for row in rows} <= {"reference", "triton", "cpp"}


def test_versions_and_what_is_missing(found):
    assert _row(found, "torch").value == torch.__version__
    assert _row(found, "jiwer").value.startswith("4.")
    assert _row(found, "apex").note.startswith(("not used: ", "fused"))


def test_the_cpu_kernels_are_there_or_how_to_build_them(monkeypatch):
    monkeypatch.setattr(native, "unsupported_reason", lambda: "no such library")
    row = _row(doctor.report(), "CPU kernels")
    assert row.value == "not built"
    assert row.note.endswith(f"no such library ({native.HOW_TO_BUILD})")
    for example in ("ctc_loss on cpu", "attention, causal on cpu", "guided_attention on cpu"):
        note = _row(doctor.report(), example).note
        assert f"cpp: no such library ({native.HOW_TO_BUILD})" in note
    monkeypatch.setattr(native, "unsupported_reason", lambda: None)
    assert _row(doctor.report(), "CPU kernels").value == "built"


def test_the_text_has_a_table_for_each_section(found):
    text = found.text()
    titles = [part.split("|")[1].strip() for part in text.split("\n\n")]
    assert titles == ["system", "packages", "operations"]
    assert all(row.name in text for row in found.rows)


@pytest.mark.parametrize("columns", [80, 100])
def test_the_real_report_has_the_width_of_the_terminal(found, columns):
    recipe = recipe_rows("fastconformer_transducer_streaming", ["training.device=cpu"])
    assert recipe
    lines = doctor.Report((*found.rows, *recipe)).text(columns).splitlines()
    assert columns - 5 < max(map(len, lines)) <= columns


def test_another_package_named_apex_is_recognised(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert "package of that name" in _row(doctor.report(), "apex").note


def backend(reason=None, error=None):
    """A module of an implementation that refuses, fails or serves."""

    def run(arguments):
        if error is not None:
            raise error

    return SimpleNamespace(unsupported_reason=lambda arguments: reason, run=run)


@pytest.mark.parametrize(
    ("backends", "value", "notes"),
    [
        (
            {
                Backend.TRITON: backend("wants an even day"),
                Backend.VARLEN: backend(error=RuntimeError("illegal\naddress")),
                Backend.REFERENCE: backend(),
            },
            "reference",
            ["triton: wants an even day; varlen: fails with RuntimeError: illegal address"],
        ),
        (
            {
                Backend.VARLEN: backend(),
                Backend.FLASH_ATTN_2: backend(),
                Backend.FLASH_ATTN_3: None,
                Backend.REFERENCE: backend(),
            },
            "varlen",
            ["flash_attn_2: on request; flash_attn_3: cannot be imported"],
        ),
        (
            {Backend.TRITON: None},
            "none",
            ["reference: not implemented", "No module named 'no_such_none_triton'"],
        ),
    ],
)
def test_backends_are_named_with_what_they_do_not_serve(monkeypatch, backends, value, notes):
    # Modules are cached by name.
    names = {name: f"no_such_{value}_{name}" for name in backends}
    for name, module in backends.items():
        if module is not None:
            monkeypatch.setitem(sys.modules, names[name], module)
    implementations = OPERATIONS["ctc_loss"].backends
    # Backwards, so that they are put back in their order.
    for name in reversed([*implementations]):
        monkeypatch.delitem(implementations, name)
    for name in backends:
        monkeypatch.setitem(implementations, name, names[name])
    row = _row(doctor.report(), "ctc_loss on cpu")
    assert row.value == value
    assert all(note in row.note for note in notes)


def test_on_a_gpu_the_reference_does_not_count_as_a_backend(monkeypatch):
    op = OPERATIONS["depthwise_conv"]
    example = dataclasses.replace(op.examples[0], label="any")
    reason = lambda *given: None if given[-1] is Backend.REFERENCE else "no"
    monkeypatch.setattr(doctor, "_unsupported_reason", reason)
    row = doctor._operation(op, example, torch.device("cuda"))
    assert row.name == "any on cuda"
    assert row.value == "none"
    assert "reference: slow on a GPU, so only on request" in row.note


def test_a_recipe_has_the_reasons_against_a_graph(capsys):
    command = ["doctor", "--recipe", "demo_transducer", "training.activation_checkpointing=true"]
    rows = recipe_rows(command[2], [*command[3:], "training.device=cpu"])
    (row,) = [row for row in rows if row.name == "training.cuda_graph"]
    assert row.section == "recipe demo_transducer on cpu"
    assert row.value == "no"
    fields = [note.split(":")[0] for note in row.notes]
    assert fields == ["training.activation_checkpointing", "training.device"]
    assert main([*command, "training.device=cpu"]) == 0
    visible = capsys.readouterr().out
    assert "recipe demo_transducer on cpu" in visible
    assert "training.bfloat16_weights" in visible


def test_a_requested_graph_is_refused_and_an_unwanted_one_is_possible(monkeypatch):
    requested = recipe_rows("small", ["training.cuda_graph=true", "training.device=cpu"])
    assert {row.name: row.value for row in requested}["training.cuda_graph"] == "refused"
    monkeypatch.setattr(doctor, "choose_device", lambda name: torch.device("cuda"))
    # Backends are called on the device.
    monkeypatch.setattr(doctor, "explained_backends", lambda *_: [])
    rows = {row.name: row for row in recipe_rows("small", ["training.cuda_graph=false"])}
    assert rows["training.cuda_graph"].value == "no"
    assert rows["training.cuda_graph"].note == "possible, but turned off"
    for recipe in ("demo_transducer", "fastconformer_tdt"):
        rows = {row.name: row for row in recipe_rows(recipe, [])}
        assert rows["training.cuda_graph"].value == "yes", recipe
    rows = {row.name: row for row in recipe_rows("small", [])}
    assert rows["training.cuda_graph"].value == "yes"
    assert rows["training.bfloat16_weights"].value == "yes"


def test_a_recipe_has_the_backends_of_its_operations_and_why():
    overrides = ["training.device=cpu", "kernels.decoder_attention=reference"]
    rows = {
        row.name: row
        for row in recipe_rows("small", [*overrides, "kernels.cross_attention=flash_attn_3"])
        if row.name.startswith("kernels.")
    }
    served = "reference" if native.unsupported_reason() else "cpp"
    assert {name: row.value for name, row in rows.items()} == {
        "kernels.attention (encoder)": served,
        "kernels.decoder_attention (decoder)": "reference",
        "kernels.cross_attention (decoder)": "refused",
        "kernels.guided_attention (decoder)": served,
        "kernels.ctc_loss (the CTC loss)": served,
    }
    notes = {name: row.notes for name, row in rows.items()}
    assert "varlen: does not support relative positions" in notes["kernels.attention (encoder)"]
    assert notes["kernels.decoder_attention (decoder)"] == ["as the recipe says"]
    (refusal,) = notes["kernels.cross_attention (decoder)"]
    assert "is flash_attn_3" in refusal


def test_a_recipe_with_a_language_model_shows_its_budgets():
    common = ["training.device=cpu", "model.language_model.path=no/such/folder"]
    result = {row.name: row for row in recipe_rows("speech_llm_demo", common)}
    assert result["training.compile"].value == "no"
    assert result["data.frame_budget"].value == "320"
    assert result["data.token_budget"].value == "by the data"
    assert result["training.cuda_graph"].value == "no"
    assert "the run is on cpu" in result["training.cuda_graph"].note
    automatic = recipe_rows("speech_llm_demo", [*common, "data.frame_budget=auto"])
    assert {row.name: row.value for row in automatic}["data.frame_budget"] == "auto"
    compiled = recipe_rows("speech_llm_demo", [*common, "training.compile=true"])
    assert {row.name: row.value for row in compiled}["training.compile"] == "yes"
