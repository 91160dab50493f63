"""Checks of configurations, with messages of one form: ``field`` must RULE, but is VALUE."""

import dataclasses
import re
from typing import Any

from effasr.untrusted.remote import canonical, is_url, without_credentials

LIMITS = {
    "layers": 1000,
    "mel_bins": 1024,
    "n_fft": 1 << 14,
    "sample_rate": 1_000_000,
    "minimum_s": 120,
    "max_positions": 1 << 15,
    "max_frames": 1 << 15,
    "count": 1 << 12,
    "codebooks": 32,
    "codes": 1 << 14,
    "code_width": 128,
}
"""Largest sizes by field: a model is built, without weights, before it is compared with a file's,
and these decide how many modules there are, or the size of tables that no file holds."""

_MOST_OF_OTHERS = 1 << 20
"""Largest value of a field without a limit in `LIMITS`."""


def check(condition: object, name: str, rule: str, value: Any, remedy: str = "") -> None:
    if not condition:
        raise ValueError(f"`{name}` must {rule}, but is {value}{f': {remedy}' if remedy else ''}.")


def check_urls(name: str, value: object, *, allowed: bool) -> None:
    """Check URLs, also in lists: as paths they would name a folder `s3:` of this machine."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if allowed and is_url(item):
            canonical(item)
        elif is_url(item):
            rule, remedy = "be a path on this machine", "copy it with `aws s3 cp` or `rclone copy`"
            url = re.sub(":/+", "://", without_credentials(str(item)), count=1)  # of a `Path`
            check(False, name, rule, f"the URL {url[:80]}", remedy)


def check_limits(config: Any, *path: str) -> None:
    """Check that the sizes of a configuration and of those in it are within `LIMITS`."""
    for field in dataclasses.fields(config):
        value, names = getattr(config, field.name), (*path, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if dataclasses.is_dataclass(part):
                check_limits(part, *names)
            elif isinstance(part, int | float) and field.name != "seed":
                most = LIMITS.get(field.name, _MOST_OF_OTHERS)
                check(part <= most, ".".join(names), f"be at most {most}", part)


def check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value >= 1, name, "be at least 1", value)


def check_dropouts(config: Any) -> None:
    """Check that the fields whose names say dropout are in [0, 1)."""
    for field in dataclasses.fields(config):
        if field.name.endswith("dropout"):
            value = getattr(config, field.name)
            check(0 <= value < 1, field.name, "be in [0, 1)", value)


def check_choices(config: object, **choices: tuple[str, ...]) -> None:
    for name, values in choices.items():
        value = getattr(config, name)
        check(value in values, name, f"be one of {', '.join(values)}", repr(value))
