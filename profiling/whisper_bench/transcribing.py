"""Greedy transcription of utterances in memory: features, encoder, and as many tokens as asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from effasr.data.collate import Example, collate
from effasr.decoding.continuous_batching.engine import Engine, Utterance
from effasr.transcription.batching import plan_batches
from effasr.transcription.packed_weights import PackedWeights
from whisper_bench.checkpoint import EOS, PROMPT
from whisper_bench.corpus import Corpus
from whisper_bench.models import effasr_model, feature_extractor, transformers_model
from whisper_bench.settings import Settings
from whisper_bench.system import resident_bytes

Tokens = dict[int, list[int]]
"""Transcript of each utterance by number."""


class _Passes:
    """A pass transcribes all utterances."""

    def __init__(self, settings: Settings) -> None:
        self._corpus = Corpus.of(settings)
        self._batches = self._corpus.sorted_batches()
        chosen = range(len(self._corpus.seconds))
        self._examples = self._corpus.examples(chosen)
        self._limits: dict[int, int] = {}
        for batch in self._batches:
            self._limits |= dict.fromkeys(batch, self._corpus.limit(batch))

    def check(self) -> dict[str, Any]:
        """Return the tokens of every utterance.

        Raises:
            ValueError: An utterance has another number of tokens than all systems are asked for.
        """
        found = self._transcribe()
        for index, limit in self._limits.items():
            if len(found[index]) != limit:
                raise ValueError(
                    f"utterance {index} must have {limit} tokens, but has {len(found[index])}."
                )
        return {"tokens": [found[index] for index in range(len(found))]}

    def run(self, number: int) -> dict[str, Any]:
        """Transcribe them all."""
        del number
        began = time.perf_counter()
        self._transcribe()
        seconds = time.perf_counter() - began
        audio = sum(len(example.audio) for example in self._examples) / 16_000
        return {
            "seconds": seconds,
            "audio_s": audio,
            "utterances": len(self._examples),
            "tokens": sum(self._limits.values()),
        }

    def _transcribe(self) -> Tokens:
        raise NotImplementedError


class _PaddedPasses(_Passes):
    """Batches of features that transformers' extractor pads to the model's window."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._extract = feature_extractor(settings)

    def _transcribe(self) -> Tokens:
        found: Tokens = {}
        for batch in self._batches:
            audio = [self._examples[index].audio for index in batch]
            made = self._extract(audio, sampling_rate=16_000, return_tensors="pt")
            said = self._decode(made.input_features, self._limits[batch[0]])
            found |= dict(zip(batch, said, strict=True))
        return found

    def _decode(self, features: torch.Tensor, limit: int) -> list[list[int]]:
        raise NotImplementedError


class TransformersPasses(_PaddedPasses):
    """transformers' ``generate``."""

    def __init__(self, settings: Settings, system: str) -> None:
        del system
        import transformers
        from transformers import WhisperForConditionalGeneration  # noqa: F401

        self.base_bytes, self.version = resident_bytes(), f"transformers {transformers.__version__}"
        super().__init__(settings)
        self._model = transformers_model(settings).eval()

    @torch.no_grad()
    def _decode(self, features: torch.Tensor, limit: int) -> list[list[int]]:
        prompts = torch.tensor([PROMPT] * len(features))
        made = self._model.generate(
            features, decoder_input_ids=prompts, max_new_tokens=limit, do_sample=False
        )
        return made[:, -limit:].tolist()


class CTranslate2Passes(_PaddedPasses):
    """CTranslate2, with which faster-whisper decodes, in the precision that the system names."""

    def __init__(self, settings: Settings, system: str) -> None:
        compute_type = system.removeprefix("ctranslate2_")
        import ctranslate2
        from transformers import WhisperFeatureExtractor  # noqa: F401

        self.base_bytes, self.version = resident_bytes(), f"ctranslate2 {ctranslate2.__version__}"
        super().__init__(settings)
        known = ctranslate2.get_supported_compute_types("cpu")
        if compute_type not in known:
            raise ValueError(f"this CPU has no {compute_type}: {', '.join(sorted(known))}.")
        self._storage = ctranslate2.StorageView.from_array
        self._model = ctranslate2.models.Whisper(
            str(settings.converted(compute_type)),
            device="cpu",
            compute_type=compute_type,
            inter_threads=1,
            intra_threads=settings.threads,
        )

    def _decode(self, features: torch.Tensor, limit: int) -> list[list[int]]:
        found = self._model.generate(
            self._storage(features.numpy()),
            [list(PROMPT)] * len(features),
            beam_size=1,
            # It writes half as many tokens, or what the prompt leaves of them if that is less.
            max_length=max(2 * limit, limit + len(PROMPT)),
            suppress_blank=False,
        )
        return [one.sequences_ids[0] for one in found]


class EffasrPasses(_Passes):
    """Decode a window of utterances as ``effasr transcribe``, in as many slots as a batch has.

    The lengths that it would allow a transcript are replaced by those that all systems are asked
    for. The encoder's batches have at most the frames that the others pad theirs to.
    """

    def __init__(self, settings: Settings, system: str) -> None:
        self.base_bytes, self.version = resident_bytes(), "effasr"
        super().__init__(settings)
        self._model = effasr_model(settings, settings.minimum_s(system)).eval()
        self._weights = PackedWeights(self._model)
        most = self._model.config.encoder.max_frames
        assert most is not None  # of Whisper's encoder
        self._most, self._slots = most, settings.batch

    @torch.no_grad()
    def _transcribe(self) -> Tokens:
        features = self._model.config.features
        frames = [features.encoder_frames(len(example.audio)) for example in self._examples]
        budget = self._slots * self._most
        engine = Engine(
            self._model,
            EOS,
            slots=self._slots,
            max_frames=self._most,
            frame_budget=budget,
        )
        found: Tokens = {}
        with self._weights.active():
            for indices in plan_batches(frames, budget, self._slots):
                self._submit(engine, indices, [self._examples[index] for index in indices])
                found |= {name: list(one.tokens) for name, one in engine.results(drain=False)}
            found |= {name: list(one.tokens) for name, one in engine.results()}
        return found

    def _submit(self, engine: Engine, names: Sequence[int], examples: Sequence[Example]) -> None:
        framing = self._model.config.features.framing
        batch = collate(examples, eos_id=EOS, pad_id=EOS, framing=framing)
        encoded = self._model.encode(batch)
        engine.submit(encoded, [Utterance(name, PROMPT, self._limits[name]) for name in names])
