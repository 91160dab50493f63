"""Configurations tried for the recipe ``small``, each with one change from another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from small_data.effasr_runs import Choice

_BASE = Path(__file__).with_name("base.yaml")

JOINT = ("--method", "attention", "--beam", "4", "--ctc-weight", "0.4")
CTC = ("--method", "ctc")
ATTENTION = ("--method", "attention")

_BOTH = {"ctc": CTC, "joint": JOINT}
_DROPOUT = tuple(
    f"model.{part}.{place}_dropout=0.1"
    for part in ("encoder", "decoder")
    for place in ("residual", "activation")
)
_AUGMENTED = (
    *_DROPOUT,
    "data.speed_perturbation=[0.9,1.0,1.1]",
    "model.spec_augment.freq_masks=2",
    "model.spec_augment.freq_width=14",
    "model.spec_augment.time_masks=4",
)
_QUARTER = ("model.encoder.subsampling=4", "data.frame_budget=1000", "data.micro_batches=1")
_20_S, _10_S, _80_S = (f"data.frame_budget={frames}" for frames in (500, 250, 2000))
_CTC_FIRST = ("loss.ctc_weight_before=0.9",)
_WITHOUT_DECODER = (
    *("model.decoder=null", "loss.ctc_weight=1", "loss.guided_weight=0"),
    *("loss.ctc_weight_before=null", "loss.guided_after_ctc=null"),
)
_ENCODER_AUGMENTED = tuple(field for field in _AUGMENTED if "decoder" not in field)


def _choice(name: str, vocabulary: int, *parts: Sequence[str], hybrid: bool = True) -> Choice:
    overrides = tuple(field for part in parts for field in part)
    return Choice(name, str(_BASE), vocabulary, overrides, _BOTH if hybrid else {"ctc": CTC})


_LEARNING = (*_QUARTER, *_AUGMENTED, *_CTC_FIRST, _20_S)
"""The configuration that learnt best; those below differ from it as their names indicate."""

LADDER = (
    _choice("8x", 256, ()),
    _choice("4x", 256, _QUARTER),
    _choice("4x, augmented", 256, _QUARTER, _AUGMENTED),
    _choice("4x, augmented, CTC first", 256, _QUARTER, _AUGMENTED, _CTC_FIRST),
    _choice("20 s a step", 256, _LEARNING),
    _choice("vocabulary 128", 128, _LEARNING),
    _choice("vocabulary 96", 96, _LEARNING),
    _choice("vocabulary 500", 500, _LEARNING),
    _choice("10 s a step", 128, _LEARNING, [_10_S]),
    _choice("80 s a step", 128, _LEARNING, [_80_S]),
    _choice(
        *("CTC alone", 128, _QUARTER, _ENCODER_AUGMENTED, [_20_S], _WITHOUT_DECODER), hybrid=False
    ),
    _choice("CTC 0.5 before", 128, _LEARNING, ["loss.ctc_weight_before=0.5"]),
    _choice("not augmented", 128, _QUARTER, _CTC_FIRST, [_20_S]),
    _choice("6 layers", 128, _LEARNING, ["model.encoder.layers=6"]),
    _choice("width 192", 128, _LEARNING, ["model.encoder.width=192", "model.decoder.width=192"]),
    _choice("EMA", 128, _LEARNING, ["training.ema_decay=0.998"]),
    _choice("learning rate 3e-3", 128, _LEARNING, ["optimizer.lr=3e-3"]),
    _choice("learning rate 8e-4", 128, _LEARNING, ["optimizer.lr=8e-4"]),
    Choice("recipe small", "small", 128, (), _BOTH),
    # With as many seconds of audio a step as at 4x.
    *(
        Choice(
            *(f"recipe small, 8x, vocabulary {size}", "small", size),
            ("model.encoder.subsampling=8", "data.frame_budget=250"),
            _BOTH,
        )
        for size in (128, 500)
    ),
)
"""Overrides of ``base.yaml``: 8x subsampling, no augmentation, 80 s a step."""
