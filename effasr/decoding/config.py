"""Configuration of decoding: search, chunking and batching."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from effasr.model.checks import check, check_positive

_COUNTS = "beam", "max_symbols", "frame_budget", "max_sequences", "extra_tokens", "workers"


LENGTH_PENALTY = 0.6
"""The default. Wu et al., 2016, https://arxiv.org/abs/1609.08144, recommend 0.6 to 0.7."""


LM_WEIGHT = 0.3
"""The default."""


INSTRUCTION = "Transcribe the speech."
"""The default."""


CORRECTOR_MARGIN = 2.0
"""The default, in nats: 1.5 and 2 made the fewest errors on the dev set of the demo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingConfig:
    """Splitting, batching and decoding of recordings.

    Attributes:
        method: ``attention``, ``transducer``, ``ctc``, ``language_model``, or ``auto``: the first
            of them that the model has.
        beam: Hypotheses of each utterance; 1 for greedy search.
        length_penalty: With the attention decoder and a beam, the exponent a by which a transcript
            of score s and n tokens, its end included, ranks: ``s / ((5 + n) / 6) ** a``. 0 takes
            the likeliest, which tends to be too short; 1 is nearly the mean over the tokens. None
            for 0.6, and where it is unused.
        coverage_penalty: With the attention decoder and a beam, weight of the share of frames that
            a transcript covers, so that transcripts that omit speech rank lower; see
            `effasr.decoding.coverage`. It makes the search slower. None or 0 for none.
        ctc_weight: With the attention decoder, the share of CTC in the scores, from 0 to 1; more
            than 0 needs a model with both. It keeps the decoder from skipping and repeating speech.
        no_repeat_ngram: With the attention decoder, n: no n tokens in a row come twice in a
            transcript, which ends loops. A small n also forbids what is rightly said twice. None to
            allow all.
        lm: Language model for shallow fusion with the attention decoder or a CTC beam: an ARPA file
            of n-grams, plain or gzipped, or the folder of a causal language model of transformers
            with the same vocabulary; None for none.
        lm_unit: ``token`` for n-grams over token ids in decimal, ``word`` for n-grams over words,
            whose scores are added where words end: see `effasr.decoding.lm.word_fusion`.
        lm_weight: Factor of its log-probability. None for 0.3, and where there is no ``lm``.
        max_symbols: Most labels per frame in the greedy search of a transducer.
        frame_budget: Encoder frames of a batch, of 80 ms each; twice as many for a FastConformer
            that subsamples by 4, whose frames are 40 ms, and four times as many for Whisper's of
            20 ms.
        max_sequences: Utterances of a batch.
        chunk_seconds: Longer recordings are split at pauses into chunks of at most this length, or
            of what ``encoder.max_frames`` allows, if that is less.
        search_seconds: Most seconds by which a cut moves towards a pause.
        gap_seconds: Stretches without speech of this length or more are not decoded, as an
            attention decoder may hallucinate words there. Detected by loudness: see
            `effasr.transcription.inputs.vad`. None to decode everything.
        tokens_per_frame: With ``extra_tokens``, limits the length of a transcript to
            ``tokens_per_frame * frames + extra_tokens``, because the attention decoder may repeat
            itself forever. `effasr.transcription.recognizer.Recognizer` halves it for frames of 40
            ms.
        extra_tokens: See ``tokens_per_frame``.
        precision: Autocast precision of matrix products.
        workers: Threads that load audio.
        nbest: Hypotheses of each utterance to report with their scores, the transcript included,
            from 1 to ``beam``; None for the transcript alone.
        score_parts: Whether to divide the scores of the ``nbest`` hypotheses, of which there are at
            least 2, into the parts that the weights combine; for `effasr.evaluation.tuning`.
        second_lm: Language model which chooses among the ``nbest`` hypotheses of each segment: the
            folder of a causal language model of transformers, with a tokenizer of its own, or an
            ARPA file of n-grams over words, plain or gzipped. See
            `effasr.transcription.second_pass.rescore`. None for none.
        second_lm_weight: Factor of its log-probability. None for 0.3, and where there is none.
        second_word_bonus: Added to the score for each word. None for 0, and where there is none.
        corrector: Run or model directory of a model that reads the ``nbest`` hypotheses of each
            segment and writes the text: see `effasr.transcription.second_pass.corrector`. None for
            none.
        corrector_margin: The text of the search stays unless the corrector's is likelier by more
            than this, in nats. None for 2, and where there is none.
        corrector_source: What a corrector with an expert for each source reads: the name of the
            source in its training data that is most like this search. None for the only one, and
            where there are none.
        words: Whether to compute word timestamps; needs a model with a CTC head.
        confidence: Whether to compute the confidence of each transcript: see
            `effasr.transcription.results.confidence`.
        word_confidence: Whether to compute the confidence of each word from the entropy of the
            model's distributions: see `effasr.decoding.confidence.tokens`.
        calibration: File that maps these to probabilities, which ``effasr evaluate`` with
            ``--confidence`` writes for a dev set; None for the raw values.
        instruction: With a language model, the text that follows the speech in the turn of the
            user, which the answer transcribes or translates.
    """

    method: Literal["auto", "attention", "transducer", "ctc", "language_model"] = "auto"
    beam: int = 1
    length_penalty: float | None = None
    coverage_penalty: float | None = None
    ctc_weight: float = 0.0
    no_repeat_ngram: int | None = None
    lm: Path | None = None
    lm_unit: Literal["token", "word"] = "token"
    lm_weight: float | None = None
    max_symbols: int = 10
    frame_budget: int = 4096
    max_sequences: int = 256
    chunk_seconds: float = 30.0
    search_seconds: float = 3.0
    gap_seconds: float | None = 2.0
    tokens_per_frame: float = 2.0
    extra_tokens: int = 16
    precision: Literal["float32", "bfloat16"] = "float32"
    workers: int = 4
    nbest: int | None = None
    score_parts: bool = False
    second_lm: Path | None = None
    second_lm_weight: float | None = None
    second_word_bonus: float | None = None
    corrector: Path | None = None
    corrector_margin: float | None = None
    corrector_source: str | None = None
    words: bool = False
    confidence: bool = False
    word_confidence: bool = False
    calibration: Path | None = None
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        check_positive(self, *_COUNTS)
        chunk, search = self.chunk_seconds, self.search_seconds
        check(chunk >= 1.0, "chunk_seconds", "be at least 1", chunk)
        rule = f"be from 0 to half of `chunk_seconds` = {chunk}"
        check(0.0 <= search <= chunk / 2, "search_seconds", rule, search)
        for name, least, remedy in (
            ("gap_seconds", 0.1, "leave it out to decode all audio"),
            ("length_penalty", 0, "0 leaves the scores as they are, 1 favours longer transcripts"),
            ("coverage_penalty", 0, "0 leaves the ranks as they are, more favours transcripts that "
             "leave out less speech"),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None:
                check(least <= value < math.inf, name, f"be at least {least}", value, remedy)
        share = "it is the share of CTC in the scores, and the decoder has the rest"
        check(0.0 <= self.ctc_weight <= 1.0, "ctc_weight", "be from 0 to 1", self.ctc_weight, share)
        if self.no_repeat_ngram is not None:
            size, remedy = self.no_repeat_ngram, "leave it out to allow all repetitions"
            check(size >= 2, "no_repeat_ngram", "be at least 2", size, remedy)
        if self.nbest is not None:
            rule = f"be from 1 to `beam` = {self.beam}"
            remedy = "a search finds at most as many transcripts as its beam has places"
            check(1 <= self.nbest <= self.beam, "nbest", rule, self.nbest, remedy)
        rule = "be token where there is no `lm`"
        check(self.lm is not None or self.lm_unit == "token", "lm_unit", rule, self.lm_unit)
        if self.score_parts:
            rule = "be at least 2 with `score_parts`"
            check((self.nbest or 0) >= 2, "nbest", rule, self.nbest)
        if self.lm_weight is not None:
            weight = self.lm_weight
            check(self.lm is not None, "lm_weight", "be left out where there is no `lm`", weight)
            rule, remedy = "be above 0", "leave out `lm` for none"
            check(0.0 < weight < math.inf, "lm_weight", rule, weight, remedy)
        if self.calibration is not None:
            rule = "be left out without `word_confidence`"
            check(self.word_confidence, "calibration", rule, self.calibration)
        self._check_second_pass()
        self._check_corrector()
        per_frame = self.tokens_per_frame
        check(per_frame >= 0.0, "tokens_per_frame", "be at least 0", per_frame)

    def _check_second_pass(self) -> None:
        for name in ("second_lm_weight", "second_word_bonus"):
            value = getattr(self, name)
            if value is not None:
                rule = "be left out where there is no `second_lm`"
                check(self.second_lm is not None, name, rule, value)
                check(math.isfinite(value), name, "be finite", value)
        if self.second_lm_weight is not None:
            check(
                self.second_lm_weight >= 0,
                "second_lm_weight",
                "be at least 0",
                self.second_lm_weight,
            )
        if self.second_lm is None:
            return
        rule, remedy = "be at least 2 with `second_lm`", "it chooses among alternatives"
        check((self.nbest or 0) >= 2, "nbest", rule, self.nbest, remedy)
        for name in ("words", "confidence", "word_confidence"):
            rule = "be false with `second_lm`, which may choose another text"
            check(not getattr(self, name), name, rule, True)

    def _check_corrector(self) -> None:
        margin = self.corrector_margin
        if margin is not None:
            rule = "be left out where there is no `corrector`"
            check(self.corrector is not None, "corrector_margin", rule, margin)
            rule = "be at least 0 and finite"
            check(0 <= margin < math.inf, "corrector_margin", rule, margin)
        if self.corrector is None:
            rule, source = "be left out where there is no `corrector`", self.corrector_source
            check(source is None, "corrector_source", rule, repr(source))
            return
        rule, remedy = "be at least 2 with `corrector`", "it reads alternatives"
        check((self.nbest or 0) >= 2, "nbest", rule, self.nbest, remedy)
        for name in ("confidence", "word_confidence"):
            rule = "be false with `corrector`, which may write another text"
            check(not getattr(self, name), name, rule, True)

    def max_tokens(self, frames: int) -> int:
        """Limit of the tokens of a transcript of this many encoder frames."""
        return int(self.tokens_per_frame * frames) + self.extra_tokens
