"""AdaScale: the gain of a large batch, measured while training (Johnson et al. 2020).

A step on S times the reference batch is worth between 1 and S reference steps: 1 if the gradient
    has no noise, so that more data add nothing, and S if it is all noise. This *gain* multiplies
    the learning rate, and the schedule advances by it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from effasr.checks import check


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaScaleConfig:
    """Scales learning rate and progress by the noise of the gradient.

    Attributes:
        scale: S, ratio of the batch to that which the learning rate and the schedule were chosen
            for; null for the micro-batches of a step divided by
            ``optimizer.lr_reference_micro_batches``.
        smoothing: Part of the old averages of variance and square that a step keeps, in [0, 1);
            the first steps have the plain mean. null for the paper's ``max(1 - scale / 1000, 0)``.
        power: The learning rate is multiplied by the gain to this power. The paper derives 1 for
            SGD. For AdamW no gain has been derived: 0.5 is the square-root rule, which AdaptDL
            (Qiao et al., OSDI 2021) uses for Adam.
    """

    scale: float | None = None
    smoothing: float | None = None
    power: float = 0.5

    def __post_init__(self) -> None:
        check(self.scale is None or self.scale >= 1, "scale", "be at least 1 or null", self.scale)
        if self.smoothing is not None and not 0 <= self.smoothing < 1:
            raise ValueError(f"`smoothing` must lie in [0, 1) or be null, but is {self.smoothing}.")
        check(0 < self.power <= 1, "power", "lie in (0, 1]", self.power)


class Reading(Protocol):
    """Values that are being copied to the host."""

    def read(self) -> list[float]:
        """Wait for them, but not for work queued since."""
        ...


class AdaScale:
    """Measures the gain; everything stays on the device.

    A sample is a micro-batch, of any rank, whose gradient is seen before it is exchanged or added
    to others, by a hook on each parameter. Of the gradient g = sum of g_k of K samples, which hold
    the parts w_k of the step's targets, whose noise is taken as independent and alike,

        V = (sum |g_k|^2 / w_k - |g|^2) / (K - 1)    estimates the variance of g, and
        M = max(|g|^2 - V, 0)                        the square of the true gradient.

    With equal parts these are the paper's (OpenReview rygxdA4YPS, section 4). V and M are averaged
    over steps, and the gain is (S V + M) / (V + M). The norm |g| is that before clipping.

    Where R ranks make updates of their own, no rank has g. Of the gradients g_r of the ranks, which
    hold the parts w_r, Q = sum |g_r|^2 / w_r takes the place of |g|^2,

        V = (sum |g_k|^2 / w_k - Q) / (K - R), and M = max(Q - R V, 0).

    A learner that does not wait for the others measures the variance of its update, which is that
    of the whole step times the number of ``learners``; it counts the steps of the plan since its
    update before.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        config: AdaScaleConfig,
        *,
        scale: float,
        factor: float,
        device: torch.device,
        copy: Callable[[Tensor], Reading],
        learners: int = 1,
    ) -> None:
        self.scale = scale
        self._learners = learners
        self.power = config.power
        default = max(1 - scale / 1000, 0.0)
        self._smoothing = default if config.smoothing is None else config.smoothing
        self._factor = factor
        self._copy = copy
        # Written in place, so that a CUDA graph writes to the same address.
        self.square = torch.zeros((), device=device)
        # Of this rank: sum over samples of |g_k|^2 per target, and their number. Where it makes an
        # update of its own, |g_r|^2 per target, and 1.
        self.sums = torch.zeros(4, device=device)
        # Averages of V and M, their number of steps, and the progress.
        self._state = torch.zeros(4, dtype=torch.float64, device=device)
        self._reading: Reading | None = None
        self.progress = 0.0  # In reference steps, as last read by `advance`
        self._step: int | None = None  # The newest of the plan
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_hook(self.see)

    def begin(self) -> None:
        self.sums.zero_()

    @contextmanager
    def sample(self, targets: float) -> Iterator[None]:
        """Measure the backward in the block as a sample with this number of targets."""
        self.square.zero_()
        yield
        if targets:
            self.sums[0] += self.square / (targets * self._factor**2)
            self.sums[1] += 1

    def see_rank(self, norm: Tensor, targets: float) -> None:
        """Measure the gradient of a rank's own update, by its norm and number of targets."""
        if targets:
            self.sums[2] = (norm / self._factor).square() / targets
            self.sums[3].fill_(1)

    def update(
        self,
        sums: Tensor,
        targets: Tensor,
        norm: Tensor | None,
        made: Tensor,
        seen: Tensor,
        step: int | None = None,
    ) -> Tensor:
        """Record a step of the plan, and return the factor of its learning rate.

        ``norm`` is that of the whole gradient; None where ranks make updates of their own.
        """
        variance, square, count, progress = self._state
        total, samples, squares, groups = sums.double()
        total, squares = total * targets.double(), squares * targets.double()
        if norm is not None:
            squares, groups = norm.double() ** 2, torch.ones_like(groups)
        v = ((total - squares) / (samples - groups)).clamp(min=0)
        m = (squares - groups * v).clamp(min=0)
        v = v / self._learners
        usable = made & seen & (samples > groups)
        passed = 1
        if step is not None:
            before = step - 1 if self._step is None else self._step
            passed, self._step = max(step - before, 0), max(step, before)
        # Where a step is not included, its values are replaced too: they may be 0/0.
        v, m = torch.where(usable, v, variance), torch.where(usable, m, square)
        count = count + usable
        # The plain mean until its decay exceeds the smoothing.
        keep = (1 - 1 / count.clamp(min=1)).clamp(max=self._smoothing)
        variance, square = torch.lerp(v, variance, keep), torch.lerp(m, square, keep)
        noise = torch.where(count > 0, variance, 0.0)
        whole = noise + square
        gain = torch.where(whole > 0, (self.scale * noise + square) / whole, 1.0)
        self._state = torch.stack([variance, square, count, progress + gain * made * passed])
        factor = gain**self.power
        self._reading = self._copy(torch.stack([gain, self._state[3], factor]))
        return factor.float()

    @property
    def reading(self) -> Reading:
        """Return gain, progress and factor of the learning rate of the newest step."""
        if self._reading is None:
            raise RuntimeError("`update` must come before `reading`.")
        return self._reading

    def advance(self) -> float:
        """Read the progress of all steps before this one; waits for the last of them at most."""
        if self._reading is not None:
            self.progress = self._reading.read()[1]
        return self.progress

    def state_dict(self) -> dict[str, Any]:
        """Return the state; waits for the device."""
        return {"averages": self._state.tolist(), "progress": self.progress}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = self._state.new_tensor(state["averages"])
        self.progress = state["progress"]
        self._reading = self._copy(self._state.new_tensor([1.0, state["averages"][3], 1.0]))

    def begin_at(self, step: int) -> None:
        """Count the steps of a run without AdaScale as reference steps."""
        self.load_state_dict({"averages": [0.0, 0.0, 0.0, float(step)], "progress": float(step)})

    def merge(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on with the averages of all learners, from the progress of the fastest."""
        averages = torch.tensor([state["averages"] for state in states], dtype=torch.float64)
        progress = averages[:, 3].max().item()
        merged = [*averages.mean(0)[:3].tolist(), progress]
        self.load_state_dict({"averages": merged, "progress": progress})

    def see(self, gradient: Tensor) -> None:
        self.square += torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32).square()
