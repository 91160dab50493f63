"""Backends of operations: as configured, as measured, and those that cannot serve."""

import csv
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import effasr.nn.attention
from effasr.model.asr import ASRModel
from effasr.training import kernels
from effasr.training.config import KernelsConfig, TrainConfig
from effasr.training.kernels import select_backends
from effasr.training.trainer import run
from effasr_kernels import BackendUnavailable
from effasr_kernels.attention.backends import packages
from tests.ops.attention_doubles import Library, flash_attn

CPU = torch.device("cpu")


def select(config: TrainConfig, **requested: Any) -> ASRModel:
    with torch.device("meta"):
        model = ASRModel(config.model, 12)
    select_backends(model, replace(config, kernels=KernelsConfig(**requested)), CPU)
    return model


@pytest.fixture
def config(model_config) -> TrainConfig:
    """A decoder without dropout, in bfloat16, as flash-attn needs them."""
    return replace(
        TrainConfig(model=model_config),
        training=replace(TrainConfig().training, precision="bfloat16"),
    )


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A double of flash-attn 2 is installed, and the GPU is an H100."""
    library, module = Library(), ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn(library, 2)  # type: ignore[attr-defined]
    packages.find.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(packages, "capability", lambda device: (9, 0))
    yield library  # type: ignore[misc]
    packages.find.cache_clear()


def test_the_decoder_reaches_flash_attn(config: TrainConfig, flash: Library) -> None:
    parts = {"decoder_attention": "flash_attn_2", "cross_attention": "flash_attn_2"}
    model = select(config, ctc_loss="reference", **parts)
    assert model.decoder is not None
    layer = model.decoder.layers[0]
    chosen = [
        layer.self_attn.backend,
        layer.encoder_attn.backend,
        layer.encoder_attn.guided_backend,
    ]
    assert chosen == ["flash_attn_2", "flash_attn_2", None]
    assert (model.encoder.layers[0].self_attn.backend, model.ctc_backend) == (None, "reference")
    # One call for each form of attention.
    assert [call["causal"] for call in flash.calls] == [True, False]


@pytest.mark.parametrize(
    ("requested", "change", "message"),
    [
        ({"attention": "flash_attn_2"}, {},
         r"`kernels\.attention` must .* serves encoder\.\S+, but is flash_attn_2 "
         r"\(does not support relative positions\): set kernels\.attention=auto, and "
         r"kernels\.decoder_attention or"),
        ({"cross_attention": "flash_attn_2"}, {"precision": "float32"},
         r"`kernels\.cross_attention` .* not in float32\): set kernels\.cross_attention=auto\.$"),
        ({"decoder_attention": "flash_attn_2"}, {"attention_dropout": 0.1}, "support dropout"),
        ({"decoder_attention": "flash_attn_2"}, {"width": 36}, "head width .* not 18"),
        ({"decoder_attention": "flash_attn_4"}, {}, r"\(pip install --pre flash-attn-4\)"),
        ({"decoder_attention": "flash_attn_3"}, {}, r"#subdirectory=hopper'\)"),
        ({"ctc_loss": "triton"}, {}, r"`kernels\.ctc_loss` must be .* serves the CTC loss"),
    ],
)  # fmt: skip
def test_backends_that_cannot_serve(
    config: TrainConfig, flash: Library, requested: Any, change: Any, message: str
) -> None:
    if "precision" in change:
        config = replace(config, training=replace(config.training, **change))
    elif change:
        assert config.model.decoder is not None
        decoder = replace(config.model.decoder, **change)
        config = replace(config, model=replace(config.model, decoder=decoder))
    with pytest.raises(ValueError, match=message) as error:
        select(config, **requested)
    assert "\n" not in str(error.value)


def test_a_requested_backend_computes_every_training_call(make_config, monkeypatch) -> None:
    """On a CPU the C++ kernels would be taken; validation may take them."""
    seen = []

    def recorded(*arguments: Any, backend: str | None = None, **options: Any) -> Any:
        seen.append((torch.is_grad_enabled(), backend))
        return original(*arguments, backend=backend, **options)

    original = effasr.nn.attention.attention
    monkeypatch.setattr(effasr.nn.attention, "attention", recorded)
    choice = KernelsConfig(attention="reference", guided_attention="reference")
    assert run(make_config(training={"max_steps": 1}, kernels=choice)) == 0
    assert {backend for has_gradient, backend in seen if has_gradient} == {"reference"}


def test_training_does_not_start_with_a_backend_that_cannot_serve(make_config, tmp_path) -> None:
    config = make_config(data={"train": str(tmp_path / "is not read")}, training={})
    with pytest.raises(ValueError, match=r"`kernels\.attention` must be .* but is triton"):
        run(replace(config, kernels=KernelsConfig(attention="triton")))


@pytest.mark.parametrize("field", ["attention", "cross_attention", "ctc_loss"])
def test_unknown_backends(field: str) -> None:
    with pytest.raises(ValueError, match=f"`{field}` must be one of auto, triton, c.* 'hip'"):
        KernelsConfig(**{field: "hip"})


def test_auto_takes_the_fastest_measured_here_that_serves(monkeypatch, tmp_path: Path) -> None:
    path, gpu = tmp_path / "ops.csv", "NVIDIA H100 80GB HBM3"
    columns = "device", "op", "kind", "backend", "shape", "dtype", "mode", "p50_ms"
    common = {"op": "attention", "kind": "causal", "dtype": "bfloat16", "mode": "forward+backward"}
    times = {"flash_attn_2": (1, 5), "triton": (2, 3), "varlen": (4, 9), "peer: sdpa": (0, 0)}
    rows = [
        common | {"device": gpu, "backend": name, "shape": f"T={t} D=64", "p50_ms": ms}
        for name, both in times.items()
        for t, ms in zip((1, 2), both, strict=True)
    ]
    fast = common | {"backend": "cpp", "p50_ms": 0.1, "shape": "T=1 D=64"}
    # Of another GPU, mode, kind or width; without all sizes.
    rows += [fast | {"device": "NVIDIA A100"}, fast | {"device": gpu, "mode": "forward"}]
    rows += [fast | {"device": gpu} | x for x in ({"kind": ""}, {"shape": "T=1 D=128"}, {})]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    monkeypatch.setattr(kernels, "RESULTS", path)
    measured = kernels._rows(torch.device("cuda", 0), torch.bfloat16)
    assert kernels._rows(CPU, torch.bfloat16) == []

    def chosen(*refusing: str, head_width: int = 64) -> str | None:
        def serve(backend: str) -> None:
            if backend in refusing:
                raise BackendUnavailable(backend)

        parts = "attention", "decoder", torch.nn.Identity(), "backend", serve, "causal", head_width
        return kernels._backend_of(kernels._Use(*parts), "auto", measured)

    assert chosen() == "triton"
    assert chosen("triton") == "flash_attn_2"
    assert chosen(*times) is None
    assert chosen(head_width=32) is None
