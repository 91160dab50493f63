"""Splits the time of the steps into parts that add up to it exactly.

Each moment of a step belongs to the first of these that holds:

    compute         a kernel runs that is no communication
    communication   only communication runs: it is exposed, nothing hides it
    copies          only copies and fills of memory run
    data wait       the GPU has nothing to do, and the host waits for a batch
    host gap        the GPU has nothing to do, and the next work has not been launched: the host is
                    in the step, in Python, in operators, in the launch itself
    idle            the GPU has nothing to do for another reason: `queued` work that was launched
                    but not begun (latency, a dependency), the host blocked in a `synchronizing`
                    call, or `outside` of every range

Only unions of intervals are measured: kernels on several streams at once are not added up.
"""

import re
from dataclasses import dataclass

import numpy as np

from analysis import intervals
from analysis.attribution import Attribution, Launches
from analysis.steps import DATA, Steps
from analysis.table import NONE, Kind, Table

PARTS = ("compute", "communication", "copies", "data_wait", "host_gap", "idle")
IDLE = ("queued", "synchronizing", "outside")
_SYNCHRONIZE = re.compile(r".*Synchronize", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Lane:
    """One device of one process, which is a rank of the run, or a process without a GPU."""

    process: int
    device: int
    steps: Steps
    rows: np.ndarray
    parts: dict[str, np.ndarray]
    idle: dict[str, np.ndarray]
    hidden: np.ndarray
    moments: dict[str, np.ndarray]

    @property
    def wall(self) -> np.ndarray:
        """Ns of each step."""
        return self.steps.windows[:, 1] - self.steps.windows[:, 0]


def classes(table: Table, categories: list[str]) -> np.ndarray:
    """Return the part that each row of work belongs to while it runs: a number into `PARTS`."""
    is_communication = np.array([name == COMMUNICATION for name in categories] or [False])
    kind = table.work["kind"]
    part = np.zeros(len(kind), np.int64)
    part[(kind == Kind.COPY) | (kind == Kind.FILL)] = PARTS.index("copies")
    part[is_communication[table.work["name"]]] = PARTS.index("communication")
    return part


def lanes(
    table: Table,
    launches: Launches,
    steps: dict[int, Steps],
    attribution: Attribution,
    part: np.ndarray,
) -> list[Lane]:
    work = table.work
    # Without a GPU, what runs to make a batch is part of waiting for it.
    is_data = np.array([DATA.match(text) is not None for text in attribution.paths])
    is_counted = (work["device"] != NONE) | ~is_data[attribution.phase]
    ranks = [(process.rank is None, process.rank or 0) for process in table.processes]
    keys = set(zip(work["process"].tolist(), work["device"].tolist(), strict=True))
    made = []
    for process, device in sorted(keys, key=lambda key: (ranks[key[0]], *key)):
        if len(steps[process].windows):
            rows = np.flatnonzero((work["process"] == process) & (work["device"] == device))
            parts = np.where(is_counted, part, NONE)[rows]
            made.append(_lane(table, launches, steps[process], rows, parts))
    return made


def _lane(
    table: Table, launches: Launches, steps: Steps, rows: np.ndarray, parts: np.ndarray
) -> Lane:
    work, windows = table.work[rows], steps.windows
    process, device = int(work["process"][0]), int(work["device"][0])
    host = _Host(table, process, steps)
    running = [
        intervals.intersect(intervals.union(work["start"][chosen], work["end"][chosen]), windows)
        for chosen in (parts == number for number in range(3))
    ]
    busy = running[0]
    moments = {"compute": busy}
    for name, moments_of_part in zip(PARTS[1:3], running[1:], strict=True):
        moments[name] = intervals.subtract(moments_of_part, busy)
        busy = intervals.join(busy, moments_of_part)
    nothing = intervals.subtract(windows, busy)
    queued = _queued(nothing, table.work, launches, rows[parts != NONE])
    unexplained = intervals.subtract(nothing, queued)
    moments["data_wait"] = intervals.intersect(unexplained, host.data)
    unexplained = intervals.subtract(unexplained, host.data)
    synchronizing = intervals.intersect(unexplained, host.blocked)
    unexplained = intervals.subtract(unexplained, host.blocked)
    moments["host_gap"] = intervals.intersect(unexplained, host.inside)
    outside = intervals.subtract(unexplained, host.inside)
    reasons = dict(zip(IDLE, (queued, synchronizing, outside), strict=True))
    moments["idle"] = intervals.join(*reasons.values())
    each = lambda moments: intervals.covered(moments, windows[:, 0], windows[:, 1])
    return Lane(
        process,
        device,
        steps,
        rows,
        {name: each(moments[name]) for name in PARTS},
        {name: each(moments) for name, moments in reasons.items()},
        each(intervals.intersect(running[0], running[1])),
        moments,
    )


class _Host:
    def __init__(self, table: Table, process: int, steps: Steps) -> None:
        thread = steps.thread if steps.is_found else None
        spans = lambda rows: intervals.union(rows["start"], rows["end"])
        self.data = spans(table.ranges[table.annotations(process, thread, DATA)])
        calls = table.launches[table.launches["process"] == process]
        calls = calls[table.matches(_SYNCHRONIZE)[calls["name"]]]
        self.blocked = spans(calls[calls["thread"] == thread] if steps.is_found else calls)
        ranges = table.ranges[table.annotations(process, thread)]
        # A capture without ranges of steps is one: the host is inside while it goes on.
        self.inside = intervals.join(steps.host, spans(ranges))


def _queued(
    nothing: np.ndarray, work: np.ndarray, launches: Launches, rows: np.ndarray
) -> np.ndarray:
    """Return the moments of ``nothing`` after the launch of the work that comes next, a set."""
    if not len(nothing) or not len(rows):
        return intervals.EMPTY
    rows = rows[np.lexsort((launches.end[rows], work["start"][rows]))]
    starts = work["start"][rows]
    launched = np.where(launches.is_known[rows], launches.end[rows], starts)
    following = np.searchsorted(starts, nothing[:, 0])
    launch = launched[np.minimum(following, len(starts) - 1)]
    begin = np.clip(launch, nothing[:, 0], nothing[:, 1])
    begin = np.where(following == len(starts), nothing[:, 1], begin)
    return intervals.union(begin, nothing[:, 1])


# Assigns a category of work to a kernel by its name.
#
# The first pattern that matches the name decides, in this order: a name for the kernel's purpose
# (``flash_fwd``, ``nll_loss``) comes before one for its implementation (``elementwise``). The
# patterns are part of report.json. A softmax alone counts as attention, and a copy kernel, which
# runs on the multiprocessors, as copy. Of effasr_kernels, whose kernels have short names, the whole
# name is matched; ``normalize`` and ``merge_parts`` are names of kernels of several operations, and
# count for the most frequent one.

COMMUNICATION, COPY, _DATA, OTHER = "communication", "copy", "data", "other"

PATTERNS: dict[str, str] = {
    COMMUNICATION: r"nccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
    r"|\bgloo:|\bc10d::|\bmpi:|one_shot_|two_shot_",
    # The recursions of transducer, CTC and best alignment, and what is fused with them.
    "lattice": r"transducer|rnnt|lattice|^_?sweep_|^_?finish_frames|^_?place_nodes"
    r"|^(finish_states|align|spread)$|^differentiate(_kept)?$|^_?(fold|join|search|score|divide)$",
    "optimizer": r"adam|multi_tensor_apply|_foreach_|fused_?optim|(?<![a-z])lamb(?!da)|\bsgd"
    r"|clip_grad|Optimizer\.",
    "loss": r"log_?softmax|nll_loss|cross_?entropy|(?<![a-z])ctc|kl_div|(^|_)loss"
    r"|^_?(label_gradient|softmax_gradient|score_labels|merge_repeats)"
    r"|^_(grad_logits|loss_and_grad|upstream_scale)_kernel$|^_partial_normalizers$"
    r"|^_finish_statistics$",
    "attention": r"flash|fmha|attention|attn|softmax|^_?(grad_queries|grad_table|turn\b"
    r"|add_content_bias|scores$|fill_tile_table$)|^(attend_(one|several)|merge_parts|rotate)$",
    "convolution": r"conv(?!ert)|fprop|dgrad|wgrad|winograd|im2col|col2im|implicit_?gemm"
    r"|^_?(stem|strided)_|^_?merge$",
    "matmul": r"gemm|gemv|cutlass|cublas|nvjet|splitk|xmma|matmul|_mm\b|::mm\b|::bmm|addmm|baddbmm"
    r"|linear|einsum|::dot\b|wgmma|^(multiply(_transposed)?|rank_parts)$",
    "normalisation": r"layer_?norm|batch_?norm|group_?norm|rms_?norm|instance_?norm|welford"
    r"|bn_(fw|bw)|_norm\b|::norm\b|^normalize(_rows|_backward)?$|^add_norm_backward$"
    r"|^(sum_gradients|update)$",
    COPY: r"^memcpy|^memset|copy|catarray|::cat\b|::clone|::contiguous|::to\b|^append_rows$",
    "elementwise": r"elementwise|pointwise|vectorized|unrolled|triton_(poi|red|per)|reduce|dropout"
    r"|bernoulli|random|distribution|::(add|sub|mul|div|neg|relu|silu|sigmoid|glu|gelu|tanh|exp"
    r"|log|sqrt|rsqrt|pow|sum|mean|where|fill|zero|masked|clamp|threshold|maximum|minimum|abs"
    r"|lerp|addc|copysign|sign|reciprocal|std|var|bitwise|logical|gt|lt|ge|le|eq|ne)\w*\b"
    r"|multiply|divide|subtract|sqrt|cub::|scan|sort|gather|scatter|index|embedding|fill"
    r"|^activate(_gated)?(_backward)?$|^(mask_rows|cut_windows)$|^sum_(rows|segments)$",
}
_COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in PATTERNS.items()}
_NODE = re.compile(r"(?:autograd::engine::evaluate_function: )?(\w+?)Backward\d*$")
"""A node of autograd's graph, after the operator that it belongs to."""
_UNNAMED = re.compile(r"(\(anonymous namespace\)|<unnamed>)::")
_HINT = re.compile(r"\b(?!gpu_kernel_impl)\w*(?:[Ff]unctor|_kernel|_cuda|Op|Kernel)\w*")
"""Names in template parameters that distinguish kernels of the same name.

``gpu_kernel_impl`` is a parameter of many PyTorch kernels, copies and elementwise ones.
"""
CATEGORIES = (*PATTERNS, OTHER)


def categorize(name: str) -> str:
    node = _NODE.match(name)
    if node:
        name = f"aten::{node[1]}"
    for category, pattern in _COMPILED.items():
        if pattern.search(name):
            return category
    return OTHER


def shorten(name: str, longest: int = 96) -> str:
    """Return a C++ name without its return type, arguments and most of its template parameters."""
    text = _UNNAMED.sub("", name).removeprefix("void ")
    text = text[: _arguments_at(text)]
    head, _, remainder = text.partition("<")
    if remainder:
        hint = next((word for word in _HINT.findall(remainder) if word not in head), "…")
        text = f"{head}<{hint}>"
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _arguments_at(name: str) -> int:
    """Return where the arguments of a function begin: at a bracket right after its name."""
    depth = 0
    for position, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if (
            letter == "("
            and depth == 0
            and position
            and (name[position - 1].isalnum() or name[position - 1] in "_>")
        ):
            return position
    return len(name)
