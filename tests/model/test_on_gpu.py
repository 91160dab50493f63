"""The whole model on a GPU against the same model on the CPU."""

import copy
import warnings

import pytest
import torch

from effasr_kernels import allow_reference_on_gpu
from effasr_kernels.runtime.dispatch import ReferenceOnGPUWarning

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
OPTIONS = {"label_smoothing": 0.1, "guided_sigma": 0.3}


@pytest.fixture(autouse=True)
def reference():
    before = allow_reference_on_gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReferenceOnGPUWarning)
        yield
    allow_reference_on_gpu(before)


def total(losses):
    return losses.cross_entropy + losses.ctc + losses.guided


def test_float32_agrees_with_the_cpu(tiny_model, examples, make_batch, monkeypatch):
    # By default torch rounds the inputs of float32 convolutions, though not of matrix products.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    batch = make_batch(examples, static=True)
    on_gpu = copy.deepcopy(tiny_model).cuda()
    expected, actual = tiny_model(batch, **OPTIONS), on_gpu(batch.to("cuda"), **OPTIONS)
    torch.testing.assert_close(total(actual).cpu(), total(expected), rtol=1e-4, atol=1e-4)
    total(expected).backward()
    total(actual).backward()
    for (name, left), right in zip(tiny_model.named_parameters(), on_gpu.parameters(), strict=True):
        assert left.grad is not None, name
        assert right.grad is not None, name
        scale = left.grad.abs().max().item()
        torch.testing.assert_close(
            right.grad.cpu(), left.grad, rtol=1e-3, atol=1e-3 * scale + 1e-6, msg=name
        )


def test_bfloat16_autocast_is_near_float32(tiny_model, examples, make_batch):
    model = tiny_model.cuda()
    batch = make_batch(examples, static=True).to("cuda")
    exact = total(model(batch, **OPTIONS))
    with torch.autocast("cuda", torch.bfloat16):
        rounded = total(model(batch, **OPTIONS))
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.03, atol=0.0)
    rounded.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_two_runs_on_a_gpu_are_bitwise_equal(tiny_model, examples, make_batch):
    model = tiny_model.cuda()
    batch = make_batch(examples, static=True).to("cuda")
    first, second = (model(batch, **OPTIONS) for _ in range(2))
    assert torch.equal(total(first), total(second))
