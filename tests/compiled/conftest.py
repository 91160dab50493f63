"""Kernels compiled as they would be launched, for GPUs that need not be there."""

import os
from collections.abc import Callable, Iterable

import pytest

pytest.importorskip("triton")

import aot

from effasr_kernels.runtime.launch import Launch
from tests.support.kernel_resources import SHARED_LIMIT, Resources, resources_of

ARCHITECTURES = (80, 90, 100)
_MOST_REGISTERS = 255

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["*"]


@pytest.fixture(scope="session")
def compiled_ok() -> Callable[..., dict[str, Resources]]:
    """Compile launches, each binary once, and check what all kernels must satisfy.

    Called as ``compiled_ok(launches, architecture, products={"kernel", ...})``, where ``products``
    names the kernels that must use tensor cores. Returns what each kernel needs, by its name (the
    last launch of that name counts).
    """
    done: dict[tuple, Resources] = {}

    def check(
        launches: Iterable[Launch], architecture: int, *, products: Iterable[str] = ()
    ) -> dict[str, Resources]:
        found: dict[str, Resources] = {}
        for launch in launches:
            key = (architecture, *aot.key(launch))
            if key not in done:
                done[key] = resources_of(launch, architecture)
            name, needs = launch.kernel.fn.__name__, done[key]
            found[name] = needs
            what = f"{name} for sm_{architecture}, {launch.constants}, {launch.options}"
            assert needs.stack == 0, f"{what}: spills, {needs.stack} bytes of stack"
            assert needs.registers <= _MOST_REGISTERS, f"{what}: {needs.registers} registers"
            limit = SHARED_LIMIT[architecture]
            assert needs.shared <= limit, f"{what}: {needs.shared} bytes of shared memory"
            if name in products:
                assert needs.matrix_instructions > 0, f"{what}: no tensor cores"
        missing = set(products) - set(found)
        assert not missing, f"never launched: {missing}"
        return found

    return check
