"""Which runs may go on from which checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_DECISIVE = ("seed", "model", "data", "lora")
"""Parts of a configuration that decide what the weights are and which data comes when."""

_DECISIVE_BESIDE = frozenset({"optimizer.exempt", "optimizer.name", "training.freeze"})
"""Fields of other parts that do: by them the optimizer groups, and so numbers, the parameters, and
keeps what it keeps of each."""

_HARMLESS = frozenset(
    {
        "data.validation",
        "data.tokenizer",
        "data.train",
        "data.filters.max_dropped",
        "data.cache",
        "data.workers",
        "data.prefetch",
        "data.on_bad_audio",
        "data.audio_augmentation.noise.manifests",
        "data.audio_augmentation.reverberation.manifests",
    }
)
"""Fields of decisive parts that may change. Of the manifests and the tokenizer the content counts,
not the place: `effasr.data.index.corpus.Corpus` has a fingerprint of it, which is compared as
well."""


def check_same_run(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Check that a run may go on from a checkpoint.

    Args:
        saved: Configuration in the checkpoint.
        now: Configuration of this run.

    Returns:
        What else differs, each ``field: old -> new``: it is obeyed from here on.

    Raises:
        ValueError: A field that decides about the model or the order of the data differs.
    """
    tolerated = []
    for path, old, new in _differences(saved, now):
        change = f"{path}: {old!r} -> {new!r}"
        if _decides(path):
            raise ValueError(
                f"`{path}` must stay {old!r}, as in the checkpoint of this run, but is {new!r}. "
                "Set it back, choose another `name`, or begin anew with training.restart=true."
            )
        tolerated.append(change)
    return tolerated


def check_same_ranks(saved: Mapping[str, Any], strategy: str, ranks: int) -> None:
    """Check that a run may go on on this number of ranks.

    Args:
        saved: State in the checkpoint.
        strategy: ``data.strategy``.
        ranks: Of this run.

    Raises:
        ValueError: There were others, on which the order of the data depends.
    """
    before = saved.get("ranks", ranks)
    if strategy != "packed" and before != ranks:
        raise ValueError(
            f"`data.strategy` = {strategy} needs {before} ranks to go on, as in the checkpoint, "
            f"but there are {ranks}: lhotse's samplers deal out batches to a fixed number of "
            "ranks, and on another utterances would be lost or repeated. Start as many, or begin "
            "anew with training.restart=true; only strategy packed goes on on any number."
        )


def check_same_plan(saved: Mapping[str, Any], fingerprint: Callable[[int], str]) -> None:
    """Check that the epoch goes on by the plan by which it began.

    Args:
        saved: State in the checkpoint.
        fingerprint: Gives the fingerprint of the plan of an epoch.

    Raises:
        ValueError: The plan has changed.
    """
    epoch, step = saved["position"]
    before = saved.get("plan")
    if before is not None and fingerprint(epoch) != before:
        raise ValueError(
            f"the plan of epoch {epoch} must stay as it was in the checkpoint, of which {step} "
            "steps have been made, but it has changed, and utterances would be lost or repeated: "
            "restore the file of `data.bucket_batch_sizes`, the recordings of "
            "`data.audio_augmentation`, or the versions of effasr and lhotse that the run began "
            "with, or begin anew with training.restart=true."
        )


def _decides(path: str) -> bool:
    part = path.split(".")[0]
    if path in _HARMLESS or (path.startswith("data.mix.") and path.endswith(".manifests")):
        return False
    return path in _DECISIVE_BESIDE or part in _DECISIVE


def _differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for key in [*saved, *(key for key in now if key not in saved)]:
        old, new, path = saved.get(key), now.get(key), f"{prefix}{key}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{path}.")
        elif old != new:
            yield path, old, new
