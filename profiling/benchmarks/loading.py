"""How fast one core loads audio into micro-batches, by the storage of a corpus.

    python profiling/bench.py loading NAME=PATH ... --tokenizer FOLDER [--seconds S]
        [--overrides FIELD=VALUE ...] [--output ROWS.csv]

Each PATH is what data.train takes, all of the same utterances. Micro-batches are loaded in the
order of the packed plan, without worker processes, features or a model; time is that of the
processor. open_s is that of reading the corpus, without a cache.
"""

import time
from collections.abc import Sequence

import torch

from benchmarks import harness
from effasr import config as configuration
from effasr.data.loader import Loader
from effasr.data.tokenizer import load_tokenizer
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus

COLUMNS = (
    *("source", "utterances", "mean_s", "overrides", "open_s", "audio_s", "cpu_s"),
    *("audio_s_per_cpu_s", *harness.VERSIONS),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("loading", __doc__)
    parser.add_argument("corpora", nargs="+", metavar="NAME=PATH")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="to load each corpus for")
    parser.add_argument("--overrides", nargs="*", default=[], metavar="FIELD=VALUE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = harness.Table(COLUMNS, options.output, torch.device("cpu"))
    tokenizer = load_tokenizer(options.tokenizer)
    common = ["data.workers=0", "data.cache=null", "data.validation=[]", *options.overrides]
    for text in options.corpora:
        name, _, path = text.partition("=")
        fields = [f"data.train={path}", f"data.tokenizer={options.tokenizer}", *common]
        config = configuration.load(TrainConfig, "small", fields)
        started = time.process_time()
        corpus = load_corpus(config, tokenizer, None)
        open_s = time.process_time() - started
        steps = Loader(corpus, config.data, pin_memory=False).steps()
        next(steps)  # opens files
        audio_s, started = 0.0, time.process_time()
        while (cpu_s := time.process_time() - started) < options.seconds:
            audio_s += sum(batch.audio_seconds for batch in next(steps).batches)
        steps.close()
        speed = audio_s / cpu_s
        row = {
            "source": name,
            "utterances": len(corpus.lengths),
            "mean_s": round(corpus.seconds / len(corpus.lengths), 2),
            "overrides": " ".join(options.overrides),
            **{"open_s": round(open_s, 3), "audio_s": round(audio_s), "cpu_s": round(cpu_s, 2)},
            "audio_s_per_cpu_s": round(speed, 1),
        }
        table.add(
            row, f"{name:24} {speed:9,.0f} s of audio a core second, opened in {open_s:.2f} s"
        )
    return 0
