import pytest

from effasr.optim.adamw import OptimizerConfig
from effasr.optim.batch_scaling import peak_learning_rate


@pytest.mark.parametrize(
    ("rule", "micro_batches", "expected"),
    [("none", 32, 1e-3), ("linear", 32, 4e-3), ("sqrt", 32, 2e-3), ("sqrt", 2, 5e-4)],
)
def test_the_peak_follows_the_rule(rule, micro_batches, expected):
    config = OptimizerConfig(lr=1e-3, lr_scaling=rule, lr_reference_micro_batches=8)
    assert peak_learning_rate(config, micro_batches) == pytest.approx(expected)


def test_a_rule_needs_a_reference():
    assert peak_learning_rate(OptimizerConfig(lr=0.5), 64) == 0.5
    with pytest.raises(ValueError, match="`lr_reference_micro_batches` must be given for lr_scal"):
        OptimizerConfig(lr_scaling="linear")
    with pytest.raises(ValueError, match="`lr_reference_micro_batches` must be at least 1"):
        OptimizerConfig(lr_reference_micro_batches=0)
