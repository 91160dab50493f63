"""Named ranges for a profiler's time line; free, and without any import, while off."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any, Literal

Library = Literal["torch", "nvtx", "kineto"]

_NOTHING = nullcontext()
_make: Callable[[str, int | None], AbstractContextManager] | None = None

_FIRST_WITH_PAYLOADS = (0, 2, 9)
_FIRST_WITH_QUERY = (0, 2, 12)
"""First version of the package that asks the tool whether the domain is enabled. Nsight Systems of
2023 and older does not answer, and every range is silently lost."""


def range(name: str, number: int | None = None) -> AbstractContextManager:
    """Return a context whose duration shows under ``name`` once `enable` was called.

    Profilers register names permanently, so they must be few. ``number``, such as the step, is the
    payload of the ``nvtx`` package's ranges; the other libraries have none.
    """
    return _NOTHING if _make is None else _make(name, number)


def enable(library: Library = "torch", *, tool_version: tuple[int, int] | None = None) -> None:
    """Show ranges from now on.

    Args:
        library: ``torch``: torch.cuda.nvtx. ``nvtx``: the package of that name, in domain
            ``effasr``. ``kineto``: annotations for torch.profiler.
        tool_version: Year and number of the Nsight Systems that records, such as (2023, 4), if
            known: with ``nvtx``, versions are refused that would lose every range.
    """
    global _make
    if library == "kineto":
        profiler = importlib.import_module("torch.profiler")
        _make = lambda name, number: profiler.record_function(name)
    elif library == "nvtx":
        _make = _of_package(tool_version)
    else:
        torch_nvtx = importlib.import_module("torch.cuda.nvtx")
        with torch_nvtx.range("effasr"):
            _make = lambda name, number: torch_nvtx.range(name)


def disable() -> None:
    global _make
    _make = None


def _of_package(
    tool_version: tuple[int, int] | None,
) -> Callable[[str, int | None], AbstractContextManager]:
    nvtx = importlib.import_module("nvtx")
    installed = version("nvtx")
    numbers = tuple(int(part) for part in installed.split(".")[:3] if part.isdigit())
    if numbers < _FIRST_WITH_PAYLOADS:
        raise RuntimeError(f"nvtx {installed} has no payloads: install nvtx 0.2.10 or 0.2.11.")
    if numbers >= _FIRST_WITH_QUERY and tool_version is not None and tool_version < (2024, 1):
        raise RuntimeError(
            f"nvtx {installed} loses every range under Nsight Systems "
            f"{'.'.join(map(str, tool_version))}: install nvtx 0.2.11, or use torch's own ranges."
        )

    def make(name: str, number: int | None) -> AbstractContextManager:
        options: dict[str, Any] = {"message": name, "domain": "effasr"}
        return nvtx.annotate(**options if number is None else options | {"payload": number})

    return make
