"""Experts against a dense model of as many FLOPs, on two sources that contradict each other.

    python profiling/studies/experts/compare.py [--steps 400] [--seeds 0 1 2] [--output FILE.csv]

A source gives each tone a name, the other source gives the same tones other names, with a timbre of
its own. All systems are one small encoder with a CTC head; those with experts have two of the
dense network's size in each place, of which a row uses one: by the name of its source, or by a
router. The utterances of a seed are the same for all systems, and so are the updates. A row for
each system and seed: loss and token error rate on new utterances, on each source, and the shares of
the experts.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench import rows as csv_rows
from bench.provenance import provenance

from effasr.data.batch import Batch
from effasr.data.collate import Example, collate
from effasr.decoding.ctc_greedy import ctc_greedy
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.wer import count_errors, total
from effasr.model.asr import ASRModel
from effasr.model.config import ModelConfig
from effasr.model.cost import cost_model
from effasr.model.encoder import FastConformerConfig
from effasr.nn.experts import ExpertsConfig, ExpertUse
from effasr.optim.adamw import OptimizerConfig
from effasr.optim.schedules import ScheduleConfig
from effasr.training import build
from effasr.training.config import LoopConfig, TrainConfig
from effasr.training.step import train_step

RESULTS = Path(__file__).parents[2] / "results" / "experts.csv"
SOURCES = ("sine", "square")
SYSTEMS: dict[str, ExpertsConfig | None] = {
    "dense": None,
    "named": ExpertsConfig(count=2, route="source", names=SOURCES),
    "learned": ExpertsConfig(count=2, route="learned"),
}
_TONES, _FIRST_TOKEN, _VOCABULARY = 12, 4, 16
_UTTERANCES, _TESTED = 8, 64
_ERRORS = tuple(f"error_{source}" for source in SOURCES)
COLUMNS = (
    *("study", "system", "seed", "updates", "parameters", "flops_per_frame", "loss", "error"),
    *(*_ERRORS, "expert_shares", "cpu_s", "device", "torch", "triton", "git", "date"),
)


def draw(generator: np.random.Generator, count: int) -> list[Example]:
    """Return utterances of 3 to 6 tones, the sources by turns."""
    examples = []
    for number in range(count):
        source = number % len(SOURCES)
        tones = generator.integers(_TONES, size=int(generator.integers(3, 7)))
        audio = np.concatenate([_tone(int(tone), source, generator) for tone in tones])
        # The other source reads the names backwards.
        names = tones if source == 0 else _TONES - 1 - tones
        text = (_FIRST_TOKEN + names).tolist()
        examples.append(Example(str(number), audio, [2], text, expert=source))
    return examples


def _tone(tone: int, source: int, generator: np.random.Generator) -> np.ndarray:
    """Return 0.25 to 0.4 s of a tone, a quarter of an octave above the one before, in noise."""
    seconds = np.arange(int(generator.integers(4_000, 6_400))) / 16_000
    wave = np.sin(2 * np.pi * 250 * 2 ** (tone / 4) * seconds)
    if source:
        wave = np.sign(wave)
    # Silence parts equal neighbours, which CTC would merge.
    wave[-800:] = 0
    noise = 0.05 * generator.standard_normal(len(seconds))
    return (0.2 * wave + noise).astype(np.float32)


def configuration(system: str, steps: int, seed: int) -> TrainConfig:
    """Return the configuration of a run; systems differ in the experts alone."""
    encoder = FastConformerConfig(
        width=48,
        layers=2,
        heads=4,
        feed_forward=48,
        subsampling_channels=16,
        subsampling=4,
        position="rotary",
        conv_norm="layer_norm",
        experts=SYSTEMS[system],
    )
    config = TrainConfig(
        model=ModelConfig(encoder=encoder, decoder=None, ctc=True),
        optimizer=OptimizerConfig(lr=3e-3),
        schedule=ScheduleConfig(name="cosine", warmup_steps=max(1, steps // 10)),
        training=LoopConfig(max_steps=steps, precision="float32"),
        seed=seed,
    )
    return build.resolve(config, None)


def collated(examples: Sequence[Example], config: TrainConfig) -> Batch:
    """Pack utterances in exact sizes."""
    return collate(examples, eos_id=1, pad_id=0, framing=config.model.features.framing)


def run(system: str, steps: int, seed: int) -> dict[str, object]:
    """Train a system, and return its row."""
    config, device = configuration(system, steps, seed), torch.device("cpu")
    model = build.build_model(config, _VOCABULARY, None, device)
    state = build.build_train_state(config, model, DistributedContext(0, 1, device))
    use, begin = ExpertUse(model), time.process_time()
    for step in range(steps):
        # The utterances of a step are those of every system.
        generator = np.random.default_rng([seed, step])
        train_step(state, [collated(draw(generator, _UTTERANCES), config)], step)
    shares = use.line().get("encoder_expert_shares")
    return {
        "study": "experts",
        "system": system,
        "seed": seed,
        "updates": steps,
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_frame": round(cost_model(config.model, _VOCABULARY).frame),
        **evaluate(model, config, seed),
        "expert_shares": "" if shares is None else " ".join(f"{x:.3f}" for x in shares),
        "cpu_s": round(time.process_time() - begin, 1),
    }


@torch.no_grad()
def evaluate(model: ASRModel, config: TrainConfig, seed: int) -> dict[str, float]:
    """Return loss per token, and token error rates, on utterances of no training step."""
    examples = draw(np.random.default_rng([seed, 2**31]), _TESTED)
    batch = collated(examples, config)
    model.eval()
    losses = model(batch)
    found = ctc_greedy(model, model.encode(batch), _VOCABULARY)
    counts = [
        count_errors(" ".join(map(str, example.text or [])), " ".join(map(str, tokens)))
        for example, tokens in zip(examples, found, strict=True)
    ]
    kinds = {"error": counts} | {
        name: counts[number :: len(SOURCES)] for number, name in enumerate(_ERRORS)
    }
    rates = {name: round(total(own).wer, 4) for name, own in kinds.items()}
    return {"loss": round(float(losses.ctc) / batch.num_monotonic_targets, 4), **rates}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="updates of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--output", type=Path, default=RESULTS, help="rows are appended to it")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    made = provenance(torch.device("cpu"))
    for seed in options.seeds:
        for system in options.systems:
            row = run(system, options.steps, seed) | made
            csv_rows.append(options.output, COLUMNS, row)
            line = f"{system}, seed {seed}: error {row['error']:.1%}, loss {row['loss']}"
            sys.stdout.write(f"{line}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
