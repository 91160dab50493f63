"""Memory and time of the transducer loss as the batch grows: packed in groups against padded whole.

    python profiling/studies/transducer_memory.py [--batch 8 16 32 64] [--output ROWS.csv]

Forward and backward of joint, projection and loss, on utterances as long as real ones. The padded
way is the usual one: frames and labels are padded to the longest of the batch, the joint, the
logits and their log-probabilities (B, T, U + 1, V) exist whole, and autograd differentiates them;
torchaudio's, where it is installed, differs in the loss alone. They are those of
``bench_ops.py --op transducer_loss``. Before anything is timed, gradients are compared. What is
called peak is all that is made during a call, gradients included, inputs not. On a GPU the sizes
are those of training, on a CPU small. The table at the end is of this run alone.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from bench import rows as results
from bench.contender import Contender, Gold, error
from bench.memory import peak_bytes
from bench.provenance import provenance
from bench.timing import measure
from bench.transducer.batch import Batch, draw
from bench.transducer.loss import DEFAULTS, PEERS
from bench.workload import LISTED, Workload, drawn_durations, read_durations
from bench_ops import TOLERANCE

from effasr_kernels.transducer_loss import OPERATION, TransducerArguments, set_workspace

COLUMNS = [
    *("op", "backend", "batch", "frames", "labels", "joint", "classes", "dtype", "nodes"),
    *("padded_nodes", "p50_ms", "peak_bytes", "gradient_bytes", "workspace_bytes", "error"),
    *("device", "torch", "triton", "git", "date"),
]
TOKENS_PER_SECOND = 5.4
"""Rate of English in 500 pieces: 40 seconds have about 215 labels."""
_PADDED = ("torch dense", "torchaudio float16", "torchaudio float32")
Row = dict[str, object]


def drawn(size: int, options: argparse.Namespace) -> Batch:
    """Return a batch of utterances of random durations; those of a smaller one are among them."""
    path = options.lengths or LISTED
    durations = read_durations(path) if path.exists() else drawn_durations()
    if options.seconds:
        durations = [options.seconds]
    generator = random.Random(1)
    seconds = [generator.choice(durations) for _ in range(size)]
    rates = options.frames_per_second, options.tokens_per_second
    frames, labels = ([max(1, round(x * rate)) for x in seconds] for rate in rates)
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    # It only draws: lengths and widths are given.
    workload = Workload(rows=0, head_width=0, durations=durations, device=device, dtype=dtype)
    return draw(workload, frames, labels, options.joint, options.classes)


def ours(batch: Batch, backend: str) -> Contender:
    """Return a way that uses one of our backends."""
    leaves = batch.leaves
    encoded, predicted, weight, bias = leaves.values()

    def call() -> torch.Tensor:
        # Past the dispatcher, which would hide what is made.
        arguments = TransducerArguments(
            *(encoded, predicted, batch.targets, batch.frames, batch.labels, weight, bias),
            blank_id=batch.blank_id,
            **DEFAULTS,
        )
        return OPERATION.eager(arguments, backend)

    return Contender(leaves, call, [batch.upstream])


def ways(batch: Batch) -> dict[str, Callable[[], Contender]]:
    """Ours, of which the first is the one that others are compared with; then padded ones."""
    gpu = batch.encoded.is_cuda
    on_host = "reference", "cpp"
    backends = [x for x in OPERATION.backends if x not in on_host] if gpu else list(on_host)
    found = {str(x): lambda x=x: ours(batch, x) for x in backends}
    padded = [x for x in _PADDED if gpu or "float16" not in x]
    return found | {f"peer: {x}": lambda x=x: PEERS[x](batch) for x in padded}


def measured(batch: Batch, options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each way that can compute this batch, as it comes."""
    gold: Gold | None = None
    judge = ""
    device, size = batch.encoded.device, batch.frames.num_sequences
    for name, make in ways(batch).items():
        try:
            contender = make()
            outcome = {key: x.float() for key, x in contender.outcome().items()}
            if gold is None:
                gold, judge = Gold(outcome, (0, 0), (0, 0)), name
            distance = error(outcome, gold)
            if not distance <= TOLERANCE[batch.encoded.dtype]:
                raise ValueError(f"differs from {judge} by {distance:.2g}")
            del outcome
            peak = peak_bytes(contender.gradients, device)
            timing = measure(
                contender.gradients, device, repeats=options.repeats, warmup=1, seconds=5.0
            )
        except (ImportError, RuntimeError, ValueError, OSError) as reason:
            text = " ".join(str(reason).split())[:200]
            sys.stderr.write(f"{name}, B={size}: {text}\n")
            continue
        row: Row = {
            "op": "transducer_loss",
            "backend": name,
            "batch": size,
            "frames": batch.frames.max_seqlen,
            "labels": batch.labels.max_seqlen,
            "joint": options.joint,
            "classes": options.classes,
            "dtype": options.dtype,
            "nodes": batch.nodes.count,
            "padded_nodes": batch.padded_logits // options.classes,
            "p50_ms": round(timing.p50, 3),
            "peak_bytes": peak,
            "gradient_bytes": sum(x.nbytes for x in batch.leaves.values()),
            "workspace_bytes": "" if name.startswith("peer") else options.workspace,
            "error": f"{distance:.2e}",
        }
        yield row
        sys.stdout.write(f"B {size:5}  {name:28} {timing.p50:10.1f} ms  {_mib(peak):>10} MiB\n")
        sys.stdout.flush()


def _mib(size: object) -> str:
    return f"{int(str(size)) / 2**20:.1f}"


def table(rows: list[Row]) -> str:
    """Format the results in Markdown: a line for each batch, time and peak of each way."""
    names = list(dict.fromkeys(str(row["backend"]) for row in rows))
    titles = ["B", "lattice nodes, packed / padded", "gradients, MiB"]
    titles += [f"{name.removeprefix('peer: ')}, ms / MiB" for name in names]
    lines = [titles, ["---"] * len(titles)]
    for size in dict.fromkeys(row["batch"] for row in rows):
        of = {str(row["backend"]): row for row in rows if row["batch"] == size}
        first = next(iter(of.values()))
        line = [str(size), f"{first['nodes']:,} / {first['padded_nodes']:,}"]
        line.append(_mib(first["gradient_bytes"]))
        for name in names:
            row = of.get(name)
            line.append(f"{row['p50_ms']:.0f} / {_mib(row['peak_bytes'])}" if row else "-")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--batch", nargs="*", type=int, default=[8, 16, 32, 64], help="B")
    parser.add_argument("--joint", type=int, default=640 if gpu else 64, help="J")
    parser.add_argument("--classes", type=int, default=1024 if gpu else 128, help="V")
    parser.add_argument("--dtype", default="bfloat16" if gpu else "float32")
    parser.add_argument("--lengths", type=Path, help="durations: JSON lines, .tsv, or numbers")
    parser.add_argument("--seconds", type=float, help="of every utterance, instead")
    parser.add_argument("--frames-per-second", type=float, default=25.0 if gpu else 5.0)
    parser.add_argument(
        "--tokens-per-second", type=float, default=TOKENS_PER_SECOND / (1 + 3 * (not gpu))
    )
    parser.add_argument(
        "--workspace", type=int, default=512 * 2**20, help="bytes; see set_workspace"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="rows are appended to this CSV file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure batch by batch, smallest first."""
    options = parse(arguments)
    before = set_workspace(options.workspace)
    torch.backends.cuda.matmul.allow_tf32 = False
    where = provenance(torch.device(options.device))
    rows: list[Row] = []
    for size in sorted(options.batch):
        for row in measured(drawn(size, options), options):
            rows.append(row | where)
            if options.output is not None:
                results.append(options.output, COLUMNS, rows[-1])
    set_workspace(before)
    if not rows:
        return 1
    sys.stdout.write(f"\n{where['device']}, {torch.get_num_threads()} threads, torch ")
    sys.stdout.write(f"{torch.__version__}; J {options.joint}, V {options.classes}, ")
    sys.stdout.write(f"{options.dtype}; at most {rows[-1]['frames']} frames and ")
    sys.stdout.write(f"{rows[-1]['labels']} labels\n\n{table(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
