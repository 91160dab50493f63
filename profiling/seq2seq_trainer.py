"""Fine-tunes a Whisper by transformers' Seq2SeqTrainer, for a number of seconds of processor time.

    python profiling/seq2seq_trainer.py MODEL MANIFEST OUTPUT --language CODE --cpu-s SECONDS
        [--lr RATE] [--batch N] [--seed N]

Whisper's usual recipe for it: all weights, AdamW with a linear warm-up and decay, windows of 30 s.
The seconds are those of the updates: the first, untimed, pays for what is done once. OUTPUT gets
the model for `effasr import`. Needs transformers and accelerate.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transcribers import read
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)


class Collator:
    """Pads features to 30 s, and tokens to the longest text of the batch."""

    def __init__(self, processor: Any, decoder_start: int) -> None:
        self.processor, self.decoder_start = processor, decoder_start

    def __call__(self, items: list[tuple[Any, str]]) -> dict[str, torch.Tensor]:
        audio, texts = zip(*items, strict=True)
        features = self.processor.feature_extractor(
            list(audio), sampling_rate=16_000, return_tensors="pt"
        )
        tokens = self.processor.tokenizer(list(texts), padding=True, return_tensors="pt")
        labels = tokens.input_ids.masked_fill(tokens.attention_mask == 0, -100)
        if (labels[:, 0] == self.decoder_start).all():
            labels = labels[:, 1:]  # the model shifts labels to the right, and adds it
        return {"input_features": features.input_features, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "manifest", "output"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--language", required=True)
    parser.add_argument("--cpu-s", type=float, required=True)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    processor = WhisperProcessor.from_pretrained(options.model)
    processor.tokenizer.set_prefix_tokens(language=options.language, task="transcribe")
    model = WhisperForConditionalGeneration.from_pretrained(options.model).float()
    collate = Collator(processor, model.config.decoder_start_token_id)
    data = list(zip(*read(options.manifest, joined=0.0), strict=True))

    def train(steps: int) -> float:
        arguments = Seq2SeqTrainingArguments(
            output_dir=str(options.output / "trainer"),
            per_device_train_batch_size=options.batch,
            learning_rate=options.lr,
            warmup_steps=max(1, steps // 10),
            max_steps=steps,
            seed=options.seed,
            **{"use_cpu": True, "save_strategy": "no", "report_to": [], "logging_steps": 1},
            remove_unused_columns=False,
        )
        trainer = Seq2SeqTrainer(model, arguments, train_dataset=data, data_collator=collate)
        before = time.process_time()
        trainer.train()
        return time.process_time() - before

    weights = {name: x.clone() for name, x in model.state_dict().items()}
    first, three = train(1), train(3)
    model.load_state_dict(weights)
    steps = max(1, round(options.cpu_s / ((three - first) / 2)))
    spent = train(steps)
    sys.stdout.write(f"{steps} steps of {options.batch} utterances: {spent:.0f} s of a core\n")
    model.save_pretrained(options.output)
    processor.save_pretrained(options.output)


if __name__ == "__main__":
    main()
