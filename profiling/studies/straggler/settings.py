"""Settings shared by the parent and the processes of a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = "EFFASR_STRAGGLER"
"""Names the file of the settings."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one run.

    Attributes:
        recipe: YAML file of the run.
        folder: Folder for the records of the processes.
        nodes: Number of nodes.
        per_node: Processes of each node.
        base_s: Seconds of the forward of a micro-batch on a node that is not slow.
        factors: Slowdown of each node.
        in_step: Whether ranks are synchronous; then they report their weights at the same steps.
        every_s: Approximate seconds between two such reports.
    """

    recipe: str
    folder: str
    nodes: int
    per_node: int
    base_s: float
    factors: tuple[float, ...]
    in_step: bool
    every_s: float

    def write(self, path: Path) -> None:
        """Write the settings as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read the settings that `write` wrote."""
        content: dict[str, Any] = json.loads(path.read_text())
        content["factors"] = tuple(content["factors"])
        return cls(**content)

    @property
    def steps_between(self) -> int:
        """Steps from one telling of weights to the next, where ranks go in step."""
        return max(1, round(self.every_s / (self.base_s * max(self.factors))))

    def log(self, rank: int) -> Path:
        """Return a line for each step of a rank."""
        return Path(self.folder) / f"steps_{rank}.jsonl"

    def weights(self, rank: int, number: int) -> Path:
        """Return the path of a rank's weights at some time."""
        return Path(self.folder) / f"weights_{rank}_{number:06d}.npy"
