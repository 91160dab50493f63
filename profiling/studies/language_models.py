"""Language models for second passes, and talks to try them on.

    python profiling/studies/language_models.py ngram TEXTS... --output FILE.arpa [--order N]
    python profiling/studies/language_models.py causal TEXTS... --output FOLDER
        --vocabulary N --layers N --width N --positions N --tokens N
        [--domain TEXTS] [--joined N] [--seed N]
    python profiling/studies/language_models.py talk MANIFEST --output FOLDER [--seed N]

TEXTS are manifests, or files with a text in each line. `causal` trains a Llama from random weights
for --tokens tokens, in windows of --positions, on documents of 1 to --joined lines; the last tenth
of them are of --domain. A vocabulary of 0 has the characters alone. `talk` joins a manifest's utterances, with 0.3 to 2 s between them.
"""

import argparse
import json
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Gram = tuple[str, ...]


def texts(paths: Sequence[Path]) -> list[str]:
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line)["text"] if line.startswith("{") else line for line in lines]


def arpa(sentences: Iterable[Sequence[str]], order: int) -> str:
    """Return n-grams in ARPA's format, with interpolated Witten-Bell smoothing.

    References:
        Chen and Goodman, 1998, https://dash.harvard.edu/handle/1/25104739.
    """
    counts: list[Counter[Gram]] = [Counter() for _ in range(order)]
    for sentence in sentences:
        words = ("<s>", *sentence, "</s>")
        for n in range(order):
            # <s> is context alone.
            grams = (words[end - n : end + 1] for end in range(max(1, n), len(words)))
            counts[n].update(grams)
    followers: dict[Gram, int] = defaultdict(int)
    totals: dict[Gram, int] = defaultdict(int)
    for level in counts:
        for gram, count in level.items():
            followers[gram[:-1]] += 1
            totals[gram[:-1]] += count
    share = {
        context: followers[context] / (followers[context] + totals[context]) for context in totals
    }
    # What is left of the unigrams is shared by all words and the unknown one.
    uniform = 1 / (len(counts[0]) + 1)
    probabilities: dict[Gram, float] = {}
    for level in counts:
        for gram, count in level.items():
            context = gram[:-1]
            lower = probabilities[gram[1:]] if context else uniform
            rest = share[context]
            probabilities[gram] = (1 - rest) * count / totals[context] + rest * lower
    unknown = share[()] * uniform
    lines = ["\\data\\"]
    lines += [f"ngram {n + 1}={len(level) + 2 * (not n)}" for n, level in enumerate(counts)]
    for n, level in enumerate(counts):
        lines += ["", f"\\{n + 1}-grams:"]
        if not n:
            lines += [f"{math.log10(unknown):.7f}\t<unk>", _line(-99.0, ("<s>",), share)]
        lines += [_line(math.log10(probabilities[gram]), gram, share) for gram in level]
    return "\n".join([*lines, "", "\\end\\", ""])


def _line(probability: float, gram: Gram, share: dict[Gram, float]) -> str:
    backoff = f"\t{math.log10(share[gram]):.7f}" if gram in share else ""
    return f"{probability:.7f}\t{' '.join(gram)}{backoff}"


def causal(options: argparse.Namespace) -> None:
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    lines = texts(options.texts)
    documents = []
    begin = 0
    while begin < len(lines):
        end = begin + rng.randint(1, options.joined)
        documents.append(" ".join(lines[begin:end]))
        begin = end
    rng.shuffle(documents)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    alphabet = len({character for text in documents for character in text}) + 2
    trainer = trainers.BpeTrainer(
        vocab_size=max(options.vocabulary, alphabet), special_tokens=["<unk>", "</s>"]
    )
    domain = texts([options.domain]) if options.domain else []
    tokenizer.train_from_iterator([*domain, *documents], trainer)
    end_id = tokenizer.token_to_id("</s>")
    every = max(50, len(documents) // 500)
    held_out = documents[::every]
    documents = [text for index, text in enumerate(documents) if index % every]
    stream: list[int] = []
    for until, part in ((0.9, documents), (1.0, domain or documents)):
        while len(stream) < until * options.tokens:  # several passes over few texts
            rng.shuffle(part)
            for encoded in tokenizer.encode_batch(part[:50_000]):
                stream += [end_id, *encoded.ids]
            del stream[int((until + 0.01) * options.tokens) :]
    rows = len(stream) // options.positions
    data = torch.tensor(stream[: rows * options.positions]).view(rows, options.positions)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=options.width,
            intermediate_size=4 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=max(1, options.width // 32),
            max_position_embeddings=options.positions,
            bos_token_id=end_id,
            eos_token_id=end_id,
            tie_word_embeddings=True,
        )
    )
    batch = max(1, 4096 // options.positions)
    steps = options.tokens // (batch * options.positions)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.05)
    started = time.process_time()
    for step in range(steps):
        x = data[torch.arange(step * batch, (step + 1) * batch) % rows]
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(step, steps, f"{loss.item():.3f}", flush=True)
    nats, characters = 0.0, 0
    with torch.no_grad():
        for document in held_out:
            ids = torch.tensor([[end_id, *tokenizer.encode(document).ids]])[:, : options.positions]
            if ids.shape[1] > 1:
                nats += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
                characters += len(tokenizer.decode(ids[0].tolist()[1:]))
    model.save_pretrained(options.output)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="</s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(options.output)
    figures = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "lm_cpu_s": time.process_time() - started,
        "bits_per_character": nats / characters / math.log(2),
    }
    (options.output / "lm.json").write_text(json.dumps(figures))


def talk(options: argparse.Namespace) -> None:
    rng = random.Random(options.seed)
    manifest = options.texts[0]
    lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    parts: list[np.ndarray] = []
    for line in lines:
        audio, rate = soundfile.read(manifest.parent / line["audio_filepath"], dtype="float32")
        parts += [audio, np.zeros(int(rng.uniform(0.3, 2) * rate), np.float32)]
    joined = np.concatenate(parts)
    options.output.mkdir(parents=True, exist_ok=True)
    soundfile.write(options.output / "talk.wav", joined, rate)
    text = " ".join(line["text"] for line in lines)
    row = {"audio_filepath": "talk.wav", "duration": len(joined) / rate, "text": text}
    (options.output / "data.jsonl").write_text(json.dumps({**lines[0], **row}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["ngram", "causal", "talk"])
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    for name in ("order", "vocabulary", "layers", "width", "positions", "tokens"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--domain", type=Path)
    parser.add_argument("--joined", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kind == "ngram":
        sentences = (text.split() for text in texts(options.texts))
        options.output.write_text(arpa(sentences, options.order))
    elif options.kind == "causal":
        causal(options)
    else:
        talk(options)


if __name__ == "__main__":
    main()
