"""Configuration of decoding: search, chunking and batching."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from effasr.checks import check, check_positive

if TYPE_CHECKING:
    import torch

# Fields of the search and of a second language model: the options of commands, and what a file of
# `effasr tune` may have.
SEARCH = (
    *("method", "beam", "length_penalty", "coverage_penalty", "ctc_weight", "no_repeat_ngram"),
    *("lm", "lm_unit", "lm_weight"),
)
BOOST = "boost", "boost_weight"
LONG_FORM = "long_form", "previous_text"
SECOND_PASS = "second_lm", "second_lm_weight", "second_word_bonus"

_COUNTS = "beam", "max_symbols", "max_sequences", "extra_tokens", "workers"

LENGTH_PENALTY = 0.6  # Wu et al., 2016, https://arxiv.org/abs/1609.08144, recommend 0.6 to 0.7
LM_WEIGHT = 0.3
BOOST_WEIGHT = 1.0  # nats a token; docs/transcription.md has the figures
INSTRUCTION = "Transcribe the speech."

AttentionBackend = Literal[
    "auto",
    "triton",
    "cuda",
    "cpp",
    "flash_attn_2",
    "flash_attn_3",
    "flash_attn_4",
    "varlen",
    "reference",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodingConfig:
    """Splitting, batching and decoding of recordings.

    The commands have options of the same names, whose help is the first sentence; see
    `effasr.cli.options.add_fields`.

    Attributes:
        method: Decoding method: attention, transducer, ctc, language_model, or auto (the default)
            for the first of these that the model has.
        beam: Hypotheses of each utterance in beam search (default: 1, greedy).
        length_penalty: Exponent of the length in the score of the attention decoder with ``beam``:
            0 for the likeliest transcript, more for longer ones (default: 0.6). A transcript of
            score s and n tokens, its end included, ranks by ``s / ((5 + n) / 6) ** a``. 0 tends to
            be too short; 1 is nearly the mean over the tokens.
        coverage_penalty: Weight of the share of frames that a transcript attends to, with ``beam``
            and the attention decoder; more leaves out less speech (default: 0). See
            `effasr.decoding.attention_beam.Coverage`. It makes the search slower.
        ctc_weight: Share of CTC in the scores of the attention decoder, 0 to 1; needs both
            (default: 0). It keeps the decoder from skipping and repeating speech.
        no_repeat_ngram: Length of token sequences that the attention decoder never repeats, which
            ends loops (default: all repetitions are allowed). A small one also forbids what is
            rightly said twice.
        lm: Language model over token ids for the attention decoder or a beam of CTC: n-grams (ARPA,
            plain or .gz), or the folder of a causal language model of transformers. It has the
            vocabulary of the speech model.
        lm_unit: Unit of the n-grams in ``lm``: token ids (the default), or words, which are scored
            when they end. See `effasr.decoding.lm.words.WordFusion`.
        lm_weight: Weight of the language model in the score (default: 0.3).
        boost: Phrases that are to be recognised, such as names: a text file with a phrase a line,
            optionally with a tab and a weight in nats a token; lines that begin with # are
            comments. See `effasr.decoding.lm.boosting.BoostTree`.
        boost_weight: Weight of the phrases in ``boost`` that have none, in nats a token (default:
            1). More finds more of them, and puts some where they are not said.
        max_symbols: Most labels per frame in the greedy search of a transducer.
        frame_budget: Audio to decode together, in frames of 80 ms (default: 4096, and 1536 on a
            CPU); less needs less memory. Encoder frames are twice as many for a FastConformer that
            subsamples by 4, whose frames are 40 ms, and four times as many for Whisper's of 20 ms.
        max_sequences: Utterances of a batch.
        chunk_seconds: Split longer recordings at pauses into chunks of at most so many seconds
            (default: as long as the longest training utterance, at most 30). Recordings that are
            longer are then cut at pauses, so that a chunk with pauses is no longer than half of the
            training utterances. Less where ``encoder.max_frames`` allows less.
        search_seconds: Most seconds by which a cut moves towards a pause.
        gap_seconds: Skip stretches without speech of this many seconds or more (default: 2; 0 for
            none). An attention decoder may hallucinate words there. None to decode all pauses;
            the ends of each chunk are trimmed to speech in any case.
        vad: Detector of speech: silero (a network; pip install 'effasr[vad]'), loudness, or auto
            (the default) for the first of these that is installed. Loudness takes noise that
            comes and goes for speech. See `effasr.transcription.inputs.vad`.
        no_speech: Write no text for a segment of which both the share of detected speech and the
            confidence are less than this, from 0 to 1 (default: write all). Most such segments are
            short recordings in which silero detects no speech, and those of ``gap_seconds`` 0.
        fallback: Decode again what the attention decoder repeats, by CTC where the model has it,
            else with ``no_repeat_ngram`` (the default). Texts that reach the limit of
            ``tokens_per_frame``, or repeat something at least 8 times in a row, are decoded again.
        fallback_confidence: Also decode again what has a confidence under P, from 0 to 1, and take
            a text that is above P (default: none; Whisper's own threshold is 0.37). By CTC where
            the model has it, else with a rising ``temperature``.
        tokens_per_frame: With ``extra_tokens``, limits the length of a transcript to
            ``tokens_per_frame * frames + extra_tokens``, because the attention decoder may repeat
            itself forever. `effasr.transcription.recognizer.Recognizer` halves it for frames of 40
            ms.
        extra_tokens: See ``tokens_per_frame``.
        precision: Precision of matrix products: float32 (the default), or bfloat16. On a GPU it is
            by autocast, on a CPU it rounds the linear layers alone, which is faster with
            AVX512-BF16 (`lscpu` lists avx512_bf16).
        attention: Backend of the encoder's attention (default: auto). Of ``auto``, Triton on a GPU,
            C++ or the reference on a CPU; any other is refused where it does not serve the model.
        workers: Threads that load audio.
        nbest: Also write the N best texts of each utterance with their scores, as JSON; N is at
            most ``beam``. The transcript is one of them. None for the transcript alone.
        score_parts: Whether to divide the scores of the ``nbest`` hypotheses, of which there are at
            least 2, into the parts that the weights combine; for `effasr.evaluation.tuning`.
        second_lm: Language model which chooses among the ``nbest`` texts of each segment (default
            of ``nbest`` then: ``beam``): folder of a causal language model of transformers with a
            tokenizer of its own, or n-grams over words (ARPA, plain or .gz). See
            `effasr.transcription.second_pass.rescore`.
        second_lm_weight: Weight of the second language model in the ranking (default: 0.3).
        second_word_bonus: Bonus for each word with ``second_lm`` (default: 0).
        words: Find when each word is said. None to do so only where it is possible, as subtitles
            do: not in translations, nor in answers of a language model.
        timestamps: Divide the text into segments by Whisper's tokens of times such as <|2.40|>;
            words have the times that a Canary writes (<|30|>). With ``words``, a segment has the
            times of its words. See `effasr.decoding.timestamps.TimestampRules`.
        long_form: Decode recordings in chunks between pauses (chunked, the default), or as Whisper
            does: in windows that begin where the last time in the text of the one before is
            (sequential). Segments have ``timestamps`` then. A text that repeats itself or is
            unlikely is drawn again with temperatures, unless ``fallback`` is false. See
            `effasr.transcription.decode_queue`.
        previous_text: Let the decoder read the text of the windows before, with ``long_form``
            sequential (the default), but none that was drawn with a temperature above 0.5.
        temperature: Draws tokens of the attention decoder, with a beam of 1; 0 for the best ones.
        seed: Of what is drawn.
        confidence: Whether to compute the confidence of each transcript: see
            `effasr.transcription.results.confidence`.
        word_confidence: Also compute the confidence of each word, from the entropy of the model's
            distributions. See `effasr.decoding.confidence.tokens`.
        calibration: calibration.json of an evaluation of a dev set, which makes the confidences of
            ``word_confidence`` probabilities. None for the raw values.
        instruction: Instruction for a speech language model (default: Transcribe the speech.). It
            follows the speech in the turn of the user, and the answer transcribes or translates.
    """

    method: Literal["auto", "attention", "transducer", "ctc", "language_model"] = field(
        default="auto", metadata={"metavar": "METHOD"}
    )
    beam: int = 1
    length_penalty: float | None = field(default=None, metadata={"metavar": "A"})
    coverage_penalty: float | None = field(default=None, metadata={"metavar": "B"})
    ctc_weight: float = field(default=0.0, metadata={"metavar": "W"})
    no_repeat_ngram: int | None = None
    lm: Path | None = None
    lm_unit: Literal["token", "word"] = "token"
    lm_weight: float | None = field(default=None, metadata={"metavar": "W"})
    boost: Path | None = None
    boost_weight: float | None = field(default=None, metadata={"metavar": "W"})
    max_symbols: int = 10
    frame_budget: int | None = None
    max_sequences: int = 256
    chunk_seconds: float | None = field(default=None, metadata={"metavar": "S", "option": "chunk"})
    search_seconds: float = 3.0
    gap_seconds: float | None = field(default=2.0, metadata={"metavar": "S", "option": "gap"})
    vad: Literal["auto", "silero", "loudness"] = field(default="auto", metadata={"metavar": "VAD"})
    no_speech: float | None = field(default=None, metadata={"metavar": "P"})
    fallback: bool = True
    fallback_confidence: float | None = field(default=None, metadata={"metavar": "P"})
    tokens_per_frame: float = 2.0
    extra_tokens: int = 16
    precision: Literal["float32", "bfloat16"] = "float32"
    attention: AttentionBackend = field(default="auto", metadata={"metavar": "BACKEND"})
    workers: int = 4
    nbest: int | None = None
    score_parts: bool = False
    second_lm: Path | None = field(default=None, metadata={"metavar": "LM"})
    second_lm_weight: float | None = field(default=None, metadata={"metavar": "W"})
    second_word_bonus: float | None = field(default=None, metadata={"metavar": "B"})
    words: bool | None = False
    timestamps: bool = False
    long_form: Literal["chunked", "sequential"] = field(
        default="chunked", metadata={"metavar": "FORM"}
    )
    previous_text: bool = True
    temperature: float = 0.0
    seed: int = 0
    confidence: bool = False
    word_confidence: bool = field(default=False, metadata={"option": "confidence"})
    calibration: Path | None = None
    instruction: str = INSTRUCTION

    def __post_init__(self) -> None:
        check_positive(self, *_COUNTS)
        if self.frame_budget is not None:
            check_positive(self, "frame_budget")
        chunk, search = self.chunk_seconds, self.search_seconds
        check(0.0 <= search < math.inf, "search_seconds", "be at least 0", search)
        if chunk is not None:
            check(chunk >= 1.0, "chunk_seconds", "be at least 1", chunk)
            rule = f"be from 0 to half of `chunk_seconds` = {chunk}"
            check(search <= chunk / 2, "search_seconds", rule, search)
        leaves = "0 leaves the scores as they are, 1 favours longer transcripts"
        covers = (
            "0 leaves the ranks as they are, more favours transcripts that leave out less speech"
        )
        self._check_range("gap_seconds", 0.1, "leave it out to decode all audio")
        if self.no_speech is not None:
            check(0.0 <= self.no_speech <= 1.0, "no_speech", "be from 0 to 1", self.no_speech)
        if (least := self.fallback_confidence) is not None:
            rule = "be from 0 to 1, and left out where `fallback` is false"
            is_used = self.fallback and 0.0 <= least <= 1.0
            check(is_used, "fallback_confidence", rule, least)
            rule = "be left out with `long_form` sequential, which has Whisper's thresholds"
            check(self.long_form == "chunked", "fallback_confidence", rule, least)
        self._check_range("length_penalty", 0, leaves)
        self._check_range("coverage_penalty", 0, covers)
        share = "it is the share of CTC in the scores, and the decoder has the rest"
        check(0.0 <= self.ctc_weight <= 1.0, "ctc_weight", "be from 0 to 1", self.ctc_weight, share)
        if self.no_repeat_ngram is not None:
            size, remedy = self.no_repeat_ngram, "leave it out to allow all repetitions"
            check(size >= 2, "no_repeat_ngram", "be at least 2", size, remedy)
        if self.nbest is not None:
            rule = f"be from 1 to `beam` = {self.beam}"
            remedy = "a search finds at most as many transcripts as its beam has places"
            check(1 <= self.nbest <= self.beam, "nbest", rule, self.nbest, remedy)
        self._check_left_out("lm", "lm_weight")
        rule = "be token where there is no `lm`"
        check(self.lm is not None or self.lm_unit == "token", "lm_unit", rule, self.lm_unit)
        if self.lm_weight is not None:
            rule, remedy = "be above 0", "leave out `lm` for none"
            check(0.0 < self.lm_weight < math.inf, "lm_weight", rule, self.lm_weight, remedy)
        self._check_left_out("boost", "boost_weight")
        if (weight := self.boost_weight) is not None:
            rule, remedy = "be above 0", "leave out `boost` for none"
            check(0.0 < weight < math.inf, "boost_weight", rule, weight, remedy)
        rule = "be left out with `score_parts`"
        remedy = "bonuses are no part of a score that can be weighted again"
        check(self.boost is None or not self.score_parts, "boost", rule, self.boost, remedy)
        if self.calibration is not None:
            rule = "be left out without `word_confidence`"
            check(self.word_confidence, "calibration", rule, self.calibration)
        self._check_readers_of_lists()
        rule, heat = "be 0 with a beam, and at least 0", self.temperature
        check(heat == 0 or (self.beam == 1 and 0 < heat < math.inf), "temperature", rule, heat)
        name = "timestamps" if self.timestamps else "long_form"
        rule = f"be left out with `{name}`"
        for name, remedy in (("lm", "it has no tokens of times"), ("ctc_weight", "CTC has none")):
            left_out = not self.has_times or not getattr(self, name)
            check(left_out, name, rule, getattr(self, name), remedy)
        remedy = "no list is one of segments"
        listed = self.has_times and (self.nbest or 0) > 1
        check(not listed, "nbest", rule, self.nbest, remedy)
        rule, per_frame = "be at least 0", self.tokens_per_frame
        check(per_frame >= 0.0, "tokens_per_frame", rule, per_frame)

    def budget_on(self, device: "torch.device") -> int:
        """Return ``frame_budget``, or its default for a device."""
        if self.frame_budget is not None:
            return self.frame_budget
        # More is no faster on cores, and takes memory.
        return 1536 if device.type == "cpu" else 4096

    def _check_range(self, name: str, least: float, remedy: str) -> None:
        value = getattr(self, name)
        if value is not None:
            check(least <= value < math.inf, name, f"be at least {least}", value, remedy)

    def _check_left_out(self, without: str, *names: str) -> None:
        if getattr(self, without) is None:
            for name in names:
                value = getattr(self, name)
                rule = f"be left out where there is no `{without}`"
                visible = repr(value) if isinstance(value, str) else value
                check(value is None, name, rule, visible)

    def _check_readers_of_lists(self) -> None:
        """Check what reads several hypotheses: the second language model, and tuning."""
        self._check_left_out("second_lm", "second_lm_weight", "second_word_bonus")
        for name in ("second_lm_weight", "second_word_bonus"):
            if (value := getattr(self, name)) is not None:
                check(math.isfinite(value), name, "be finite", value)
        if (weight := self.second_lm_weight) is not None:
            check(weight >= 0, "second_lm_weight", "be at least 0", weight)
        for reader, remedy in (("score_parts", ""), ("second_lm", "it chooses among alternatives")):
            if getattr(self, reader):
                rule = f"be at least 2 with `{reader}`"
                check((self.nbest or 0) >= 2, "nbest", rule, self.nbest, remedy)
        if self.second_lm is None:
            return
        for name in ("words", "confidence", "word_confidence"):
            rule = "be false with `second_lm`, which may choose another text"
            check(getattr(self, name) is False, name, rule, True)
        for name in ("no_speech", "fallback_confidence"):
            rule = "be left out with `second_lm`, which reads no confidence"
            check(getattr(self, name) is None, name, rule, getattr(self, name))

    @property
    def effective_length_penalty(self) -> float:
        return LENGTH_PENALTY if self.length_penalty is None else self.length_penalty

    @property
    def effective_lm_weight(self) -> float:
        return LM_WEIGHT if self.lm_weight is None else self.lm_weight

    @property
    def wants_words(self) -> bool:
        return self.words is not False

    @property
    def has_times(self) -> bool:
        """Whether texts are divided by tokens of times."""
        return self.timestamps or self.long_form == "sequential"

    @property
    def effective_boost_weight(self) -> float:
        return BOOST_WEIGHT if self.boost_weight is None else self.boost_weight

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the attention decoder alone takes the best token of each step."""
        alone = self.ctc_weight == 0 and self.lm is None and self.boost is None
        plain = self.no_repeat_ngram is None and not self.has_times and not self.temperature
        return self.beam == 1 and alone and plain

    def max_tokens(self, frames: int) -> int:
        return int(self.tokens_per_frame * frames) + self.extra_tokens
