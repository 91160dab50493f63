"""Beam search with the attention decoder, over all hypotheses of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from effasr.decoding.ctc_greedy import ctc_log_probs
from effasr.decoding.decoded import Decoded
from effasr.decoding.hypothesis import Batched, NBest
from effasr.decoding.lm.boosting import BoostTree
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.suppression import FORBIDDEN, Suppression
from effasr.decoding.timestamps import TimestampRules
from effasr.model.asr import ASRModel
from effasr.nn.cache.decoder_state import KEPT_SHARE
from effasr_kernels import PackedSequence

# CTC prefix scores, for joint CTC/attention decoding.

_NONE = -torch.inf


@dataclass(frozen=True, slots=True)
class CTCPrefixScorer:
    """K prefixes of each of N utterances, with their CTC forward variables.

    The forward variables of a prefix are the log-probabilities of all paths over the first t frames
    that spell exactly it, t = 0 to the longest, by what the paths end with. They obey linear
    recurrences over the frames, which cumulative sums solve for all frames at once.

    Graves, 2012, https://doi.org/10.1007/978-3-642-24797-2, section 7.5.2; Watanabe et al., 2017,
    https://doi.org/10.1109/JSTSP.2017.2763455.
    """

    log_probs: Tensor  # float32 (V + 1, T), of each symbol, the blank last, at each packed frame
    rows: Tensor  # int64 (N, longest), the packed frame of each frame of each utterance
    lengths: Tensor  # int64 (N,), frames of each utterance
    last: Tensor  # int64 (N, K), the last token; -1 where there is none
    label: Tensor  # float64 (N, K, longest + 1), paths that end with the last token
    # float64 (N, K, longest + 1), paths that end with a blank, or with nothing at t = 0.
    blank: Tensor

    @classmethod
    def begin(
        cls, model: ASRModel, encoded: PackedSequence, count: int, beam: int
    ) -> CTCPrefixScorer:
        # The frames of a symbol are contiguous, because a prefix reads them together.
        log_probs = ctc_log_probs(model, encoded).t().contiguous()
        lengths = encoded.layout.lengths[:count]
        bounds = encoded.layout.cu_seqlens[:count].long()
        frames = torch.arange(max(lengths, default=0), device=bounds.device)
        # Frames past an utterance's end are read, but their results are not used.
        rows = (bounds[:, None] + frames).clamp(max=max(0, log_probs.shape[1] - 1))
        blank = log_probs[-1][rows].double().cumsum(1)[:, None].expand(-1, beam, -1)
        blank = torch.nn.functional.pad(blank, (1, 0))
        return cls(
            log_probs=log_probs,
            rows=rows,
            lengths=torch.tensor(lengths, device=bounds.device),
            last=torch.full((count, beam), -1, device=bounds.device),
            label=torch.full_like(blank, _NONE),
            blank=blank,
        )

    def extended(self, symbols: Tensor) -> Tensor:
        """Log-probabilities (N, K, C) of texts that start with a prefix and one of ``symbols``."""
        before = torch.logaddexp(self.label, self.blank)[:, :, None, :-1]
        repeats = (symbols == self.last[..., None])[..., None]
        before = torch.where(repeats, self.blank[:, :, None, :-1], before)
        past = torch.arange(self.rows.shape[1], device=symbols.device) >= self.lengths[:, None]
        first = before + self._at(symbols)
        return first.masked_fill(past[:, None, None], _NONE).logsumexp(-1)

    def complete(self) -> Tensor:
        """Return log-probabilities of the prefixes as complete transcripts, float64 (N, K)."""
        total = torch.logaddexp(self.label, self.blank)
        return total.gather(2, self.lengths[:, None, None].expand(*self.last.shape, 1))[..., 0]

    def advanced(self, parent: Tensor, label: Tensor) -> CTCPrefixScorer:
        """Continue with parents (N, K), each with one more label (N, K); -1 adds none."""
        row = torch.arange(len(parent), device=parent.device)[:, None]
        last, of_label, of_blank = (
            part[row, parent] for part in (self.last, self.label, self.blank)
        )
        total = torch.logaddexp(of_label, of_blank)
        before = torch.where((label == last)[..., None], of_blank, total)
        new_label = _solved(before, self._at(label.clamp(min=0)[..., None])[:, :, 0])
        blanks = self.log_probs[-1][self.rows].double()[:, None]
        new_blank = _solved(new_label, blanks.expand(-1, parent.shape[1], -1))
        stays = label < 0
        return replace(
            self,
            last=torch.where(stays, last, label),
            label=torch.where(stays[..., None], of_label, new_label),
            blank=torch.where(stays[..., None], of_blank, new_blank),
        )

    def keep(self, index: Tensor) -> CTCPrefixScorer:
        names = "rows", "lengths", "last", "label", "blank"
        return replace(self, **{name: getattr(self, name)[index] for name in names})

    def _at(self, symbols: Tensor) -> Tensor:
        """Log-probabilities of tokens at all frames: int64 (N, K, C) to float64 (N, K, C, t)."""
        return self.log_probs[symbols[..., None], self.rows[:, None, None]].double()


def _solved(inflow: Tensor, steps: Tensor) -> Tensor:
    """Solve y[t] = log(exp y[t - 1] + exp inflow[t - 1]) + x[t], with nothing at t = 0.

    Without its own steps x, y is a running sum of the inflow without the steps so far. float64 is
    precise enough to subtract the steps and to add them again.

    ``inflow``: float64 (N, K, longest + 1); ``steps``: x, float64 (N, K, longest), finite.
    """
    so_far = torch.nn.functional.pad(steps.cumsum(-1), (1, 0))
    summed = (inflow - so_far)[..., :-1].logcumsumexp(-1)
    return torch.nn.functional.pad(summed, (1, 0), value=_NONE) + so_far


# Tokens of each hypothesis where the decoder does not score alone, or twice the beam if more.
_FEWEST_CANDIDATES = 8

_COVERED = 0.5  # a frame is covered above this sum of attention over all tokens


def attention_beam(
    model: ASRModel,
    encoded: PackedSequence,  # (T, C); sequences past ``len(prompts)`` are not decoded
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],  # most tokens of each transcript after its prompt
    eos_id: int,
    classes: int | None = None,  # number of the model's classes that are tokens; all by default
    *,
    beam: int,
    length_penalty: float = 0.0,
    coverage_penalty: float = 0.0,
    ctc_weight: float = 0.0,
    no_repeat_ngram: int | None = None,
    lm: TokenLM | None = None,
    lm_weight: float = 0.0,
    boost: BoostTree | None = None,
    nbest: int | None = None,  # alternatives of each result, the transcript itself included
    timestamps: TimestampRules | None = None,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Decoded]:
    """Find a transcript with a high score for each sequence of encoder output.

    Each step extends every hypothesis by every token and by the end token, and keeps the best
    ``beam``; complete hypotheses leave the beam. With a beam of 1 and without CTC this is greedy
    search; with a large beam it is exact. A hypothesis with score s and n tokens, the end included,
    ranks by ``s / ((5 + n) / 6) ** length_penalty``. An utterance is finished when nothing in its
    beam can outrank its ``nbest``-th best complete hypothesis: scores only fall, and the largest
    divisor is that at the limit, where every hypothesis ends.

    With ``coverage_penalty`` b, ranks gain b times the share of covered frames (see `Coverage`),
    and the beam keeps the best ranks; unfinished hypotheses are assumed to cover all frames in the
    end. With ``ctc_weight`` w, a score is (1 - w) times the decoder's log-probability plus w times
    the CTC prefix score, over the tokens that the decoder ranks highest. ``lm_weight`` times the
    log-probability of the language model is added (shallow fusion), and so are the bonuses of
    ``boost``, of which unfinished hypotheses are assumed to gain at most that of one more phrase.
    With ``no_repeat_ngram`` n, no token ends an n-gram that its transcript has already. Where every
    token that the decoder ranks highest would, the transcript ends. ``timestamps`` are in the
    transcripts, and what they rule out has no share of the decoder's probability. With a
    ``temperature`` and a beam of 1, tokens are drawn, with probability in proportion to the step's
    own to the power of its inverse.

    Wu et al., 2016, https://arxiv.org/abs/1609.08144 (length and coverage penalty); Chorowski and
    Jaitly, 2017, https://arxiv.org/abs/1612.02695 (coverage); Watanabe et al., 2017,
    https://doi.org/10.1109/JSTSP.2017.2763455 (joint scores).
    """
    if not prompts:
        return []
    best = NBest(len(prompts), nbest or 1)
    classes = model.vocab_size if classes is None else classes
    alone = ctc_weight == 0 and lm is None and boost is None and no_repeat_ngram is None
    candidates = min(beam if alone else max(_FEWEST_CANDIDATES, 2 * beam), classes - 1)
    generator = None
    if temperature:
        candidates = classes - 1
        generator = torch.Generator(encoded.values.device).manual_seed(seed)
    assert model.decoder is not None
    scoring = _Scoring(
        eos_id,
        classes,
        candidates,
        length_penalty,
        coverage_penalty,
        ctc_weight,
        lm,
        lm_weight,
        boost,
        Suppression.from_decoder(model.decoder, classes),
        no_repeat_ngram,
        timestamps,
        temperature,
        generator,
    )
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    # For prompts longer than the shortest, later steps read the rest.
    shortest = min(map(len, prompts))
    state = model.start_decoding(encoded, longest, [prompt[: shortest - 1] for prompt in prompts])
    search = _AttentionBeam.begin(
        model,
        encoded,
        prompts,
        limits,
        beam,
        best.size,
        ctc=ctc_weight > 0,
        coverage=coverage_penalty > 0,
    )
    state.widen(beam)
    if search.coverage is not None:
        state.watch()
    while True:
        hidden = model.decode_step(search.tokens.flatten(), state)
        if search.coverage is not None:
            assert state.weights is not None
            reading = (search.starts > state.length)[:, None]
            search = replace(search, coverage=search.coverage.extended(state.weights, reading))
        search, parents = _advance(model.logits(hidden), search, scoring, state.length)
        search, going = _recorded(search, scoring, best)
        if not going:
            return _results(best, limits, with_alternatives=nbest is not None)
        if beam > 1:
            state.reorder(parents)
        if len(going) <= KEPT_SHARE * len(search.names):
            state.keep(going)
            search = search.keep(torch.tensor(going, device=search.names.device))


@dataclass(frozen=True, slots=True)
class Coverage(Batched):
    """Attention of K hypotheses of N utterances to each frame.

    A frame is covered once the tokens of a hypothesis, its end included, have attended to it with
    more than 0.5 in total. Attending again gains nothing, so loops are not rewarded. The paper
    (https://arxiv.org/abs/1612.02695) counts such frames; here it is their share, so that one
    weight suits short and long recordings whose scores are normalised by length. The attention is
    averaged over the heads of the decoder's last layer, where the paper's decoder has one head.
    Tokens of the prompt do not count.
    """

    frames: Tensor  # int64 (N,), of each utterance
    attended: Tensor  # float64 (N, K, longest), weights summed over tokens; 0 past the end

    @classmethod
    def begin(cls, frames: Sequence[int], beam: int, device: torch.device) -> Coverage:
        shape = len(frames), beam, max(frames, default=0)
        attended = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(torch.tensor(frames, device=device), attended)

    def shares(self) -> Tensor:
        """Return the share of covered frames: float64 (N, K), 0 for an utterance without frames."""
        covered = (self.attended > _COVERED).sum(-1)
        return covered.double() / self.frames.clamp(min=1)[:, None]

    def extended(
        self,
        weights: Tensor,  # float64 (N K, at least the longest), 0 past the end
        reading: Tensor,  # bool (N, 1), utterances whose prompt is being read
    ) -> Coverage:
        """Add the attention of one token."""
        weights = weights[:, : self.attended.shape[2]].view_as(self.attended)
        return replace(self, attended=self.attended + weights.masked_fill(reading[..., None], 0))

    def reordered(self, parent: Tensor) -> Coverage:
        """Continue with these parents, int64 (N, K)."""
        index = parent[..., None].expand_as(self.attended)
        return replace(self, attended=self.attended.gather(1, index))


@dataclass(frozen=True, slots=True)
class _Scoring:
    eos_id: int
    classes: int
    candidates: int  # C, the number of tokens that may extend a hypothesis
    length_penalty: float
    coverage_penalty: float
    ctc_weight: float
    lm: TokenLM | None
    lm_weight: float
    boost: BoostTree | None
    suppression: Suppression | None
    no_repeat_ngram: int | None
    timestamps: TimestampRules | None
    temperature: float
    generator: torch.Generator | None  # of what is drawn

    def rank(self, scores: Tensor, tokens: Tensor, covered: Tensor | float) -> Tensor:
        ranks = scores / ((5 + tokens) / 6) ** self.length_penalty
        return ranks + self.coverage_penalty * covered if self.coverage_penalty else ranks

    def score(
        self, of_decoder: Tensor, of_ctc: Tensor | None, of_lm: Tensor, bonuses: Tensor
    ) -> Tensor:
        score = of_decoder
        if of_ctc is not None:
            score = (1 - self.ctc_weight) * score + self.ctc_weight * of_ctc
        score = score if self.lm is None else score + self.lm_weight * of_lm
        return score if self.boost is None else score + bonuses

    def drawn(self, pool: Tensor, before: Tensor) -> Tensor:
        """Return ranks (N, K, C) whose largest is a draw: Gumbel's noise is added."""
        noise = torch.empty_like(pool).exponential_(generator=self.generator).log()
        return (pool - before[..., None]) / self.temperature - noise


@dataclass(frozen=True, slots=True)
class _AttentionBeam:
    """N utterances with K hypotheses each; one with a score of -inf is an empty place."""

    names: Tensor  # int64 (N,), the number of each utterance in the batch
    prompts: Tensor  # int64 (N, longest), padded
    starts: Tensor  # int64 (N,), tokens of each prompt
    limits: Tensor  # int64 (N,), of tokens after it
    counts: Tensor  # int64 (N,), tokens after the prompt so far; 0 while the prompt is being read
    best: Tensor  # float64 (N, nbest), ranks of the best complete hypotheses, the best first
    scores: Tensor  # float64 (N, K)
    of_decoder: Tensor  # float64 (N, K), log-probabilities; finite for empty places, too
    of_lm: Tensor  # float64 (N, K), log-probabilities of the language model, or 0
    bonuses: Tensor  # float64 (N, K), of the tokens so far, or 0
    phrases: Tensor  # int64 (N, K), states of the phrases that bonuses are for
    tokens: Tensor  # int64 (N, K), to be read next
    labels: Tensor  # int64 (N, K, steps), the tokens so far; -1 in steps that read a prompt
    ends: Tensor  # bool (N, K), whether the hypothesis has just ended
    ctc: CTCPrefixScorer | None
    coverage: Coverage | None

    @classmethod
    def begin(
        cls,
        model: ASRModel,
        encoded: PackedSequence,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        beam: int,
        nbest: int,
        *,
        ctc: bool,
        coverage: bool,
    ) -> _AttentionBeam:
        device, shape = encoded.values.device, (len(prompts), beam)
        starts = [len(prompt) for prompt in prompts]
        frames = encoded.layout.lengths[: len(prompts)]
        padded = [[*prompt, *[0] * (max(starts) - len(prompt))] for prompt in prompts]
        table = torch.tensor(padded, device=device)
        of_decoder = torch.zeros(shape, dtype=torch.float64, device=device)
        scores = of_decoder + _NONE
        scores[:, 0] = 0
        return cls(
            names=torch.arange(len(prompts), device=device),
            prompts=table,
            starts=torch.tensor(starts, device=device),
            limits=torch.tensor(limits, device=device),
            counts=torch.zeros_like(table[:, 0]),
            best=of_decoder.new_full((len(prompts), nbest), _NONE),
            scores=scores,
            of_decoder=of_decoder,
            of_lm=torch.zeros_like(of_decoder),
            bonuses=torch.zeros_like(of_decoder),
            phrases=torch.zeros(shape, dtype=torch.int64, device=device),
            tokens=table[:, min(starts) - 1, None].repeat(1, beam),
            labels=table.new_empty(*shape, 0),
            ends=torch.zeros(shape, dtype=torch.bool, device=device),
            ctc=CTCPrefixScorer.begin(model, encoded, len(prompts), beam) if ctc else None,
            coverage=Coverage.begin(frames, beam, device) if coverage else None,
        )

    def keep(self, index: Tensor) -> _AttentionBeam:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        scorers = {name: parts.pop(name) for name in ("ctc", "coverage")}
        parts = {name: tensor[index] for name, tensor in parts.items()}
        scorers = {name: item and item.keep(index) for name, item in scorers.items()}
        return _AttentionBeam(**parts, **scorers)


def _advance(
    logits: Tensor,  # (N K, V), after ``position`` tokens
    search: _AttentionBeam,  # its hypotheses have not ended
    scoring: _Scoring,
    position: int,  # tokens that were read, the prompt's included
) -> tuple[_AttentionBeam, Tensor]:
    """Extend every hypothesis, keep the K best; also return the row each comes from, (N K,)."""
    count, beam = search.scores.shape
    begins = (search.starts == position).repeat_interleave(beam)
    gains = None if scoring.boost is None else scoring.boost.rows(search.phrases)
    labels = search.labels.flatten(0, 1)
    symbols, steps, end = _candidates(logits, scoring, begins, labels, count, gains)
    of_decoder = search.of_decoder
    of_decoder = torch.cat([of_decoder[..., None] + steps, (of_decoder + end)[..., None]], -1)
    of_ctc = None
    if search.ctc is not None:
        of_ctc = torch.cat([search.ctc.extended(symbols), search.ctc.complete()[..., None]], -1)
    of_lm = search.of_lm[..., None].expand_as(of_decoder)
    if scoring.lm is not None:
        of_lm = of_lm + scoring.lm.scores(search.labels[:, :, -scoring.lm.order :], symbols)
    bonuses = search.bonuses[..., None].expand_as(of_decoder)
    if gains is not None:
        chosen_gains = gains[..., : scoring.classes].gather(2, symbols)
        bonuses = bonuses + torch.cat([chosen_gains, gains[..., -1:]], -1)
    pool = scoring.score(of_decoder, of_ctc, of_lm, bonuses)
    if scoring.suppression is not None or scoring.timestamps is not None:
        pool = pool.masked_fill(of_decoder <= FORBIDDEN / 2, _NONE)
    pool = pool.masked_fill(search.scores[..., None] == _NONE, _NONE)
    if scoring.no_repeat_ngram is not None:
        repeated = repeats_ngram(search.labels, symbols, scoring.no_repeat_ngram)
        pool[..., :-1].masked_fill_(repeated, _NONE)
    full = search.counts >= search.limits
    pool[..., :-1].masked_fill_(full[:, None, None], _NONE)
    counts = (position + 1 - search.starts).clamp(min=0)
    coverage = search.coverage
    if coverage is None and not scoring.temperature:
        scores, chosen = pool.flatten(1).topk(beam)
    else:
        # All have the same number of tokens, so without coverage the scores determine the ranks.
        if coverage is None:
            ranks = scoring.drawn(pool, search.scores)
        else:
            ranks = scoring.rank(pool, counts[:, None, None], coverage.shares()[..., None])
        chosen = ranks.flatten(1).topk(beam).indices
        scores = pool.flatten(1).gather(1, chosen)
    parent, candidate = chosen // pool.shape[-1], chosen % pool.shape[-1]
    # Prompt tokens are read by the one real hypothesis and its empty neighbours.
    reading = (search.starts > position)[:, None]
    parent = torch.where(reading, torch.arange(beam, device=parent.device), parent)
    ends = (candidate == scoring.candidates) & ~reading
    row = torch.arange(count, device=parent.device)[:, None]
    # Arbitrary where the end is chosen.
    symbol = symbols[row, parent, candidate.clamp(max=symbols.shape[-1] - 1)]
    symbol = torch.where(ends, scoring.eos_id, symbol)
    label = torch.where(reading, -1, symbol)
    phrases = search.phrases
    if scoring.boost is not None:
        phrases = scoring.boost.advanced(phrases.gather(1, parent), label)
    following = search.prompts[:, min(position, search.prompts.shape[1] - 1), None]
    after = replace(
        search,
        counts=counts,
        scores=torch.where(reading, search.scores, scores),
        of_decoder=torch.where(reading, search.of_decoder, of_decoder.flatten(1).gather(1, chosen)),
        of_lm=torch.where(reading, search.of_lm, of_lm.flatten(1).gather(1, chosen)),
        bonuses=torch.where(reading, search.bonuses, bonuses.flatten(1).gather(1, chosen)),
        phrases=phrases,
        tokens=torch.where(reading, following, symbol),
        labels=torch.cat([search.labels[row, parent], label[..., None]], -1),
        ends=ends,
        ctc=None if search.ctc is None else search.ctc.advanced(parent, label),
        coverage=None if coverage is None else coverage.reordered(parent),
    )
    return after, (row * beam + parent).flatten()


def _candidates(
    logits: Tensor,
    scoring: _Scoring,
    begins: Tensor,
    labels: Tensor,
    count: int,
    gains: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best tokens, int64 and float64 (N, K, C), and the end's scores, (N, K).

    ``gains`` are the bonuses of all tokens, (N, K, V + 1), with which they are the best.
    """
    logits = logits[:, : scoring.classes].float()
    total = logits.logsumexp(-1).double()
    if scoring.suppression is not None:
        # Suppression after normalisation, as in transformers: other tokens keep their probability.
        logits = scoring.suppression.applied(logits, begins)
    if scoring.timestamps is not None:
        logits = scoring.timestamps.applied(logits, labels)
        total = logits.logsumexp(-1).double()
    end = logits[:, scoring.eos_id].double() - total
    without_end = logits.index_fill(1, torch.tensor([scoring.eos_id], device=logits.device), _NONE)
    # float64 differences keep the order of the logits; float32 ones might not.
    if gains is None:
        values, symbols = without_end.topk(scoring.candidates)
    else:
        boosted = without_end + gains.flatten(0, 1)[:, : scoring.classes]
        symbols = boosted.topk(scoring.candidates).indices
        values = without_end.gather(1, symbols)
    steps = values.double() - total[:, None]
    return symbols.unflatten(0, (count, -1)), steps.unflatten(0, (count, -1)), end.view(count, -1)


def repeats_ngram(labels: Tensor, symbols: Tensor, size: int) -> Tensor:
    """Whether symbols (N, K, C) repeat an n-gram of labels (N, K, steps); -1 is in none."""
    if labels.shape[-1] < size:
        return torch.zeros_like(symbols, dtype=torch.bool)
    ngrams = labels.unfold(-1, size, 1)
    context = labels[..., None, labels.shape[-1] - size + 1 :]
    # The context is the last steps, so if it contains a -1, the n-gram contains one as well.
    begins = (ngrams[..., :-1] == context).all(-1) & (ngrams >= 0).all(-1)
    ends = ngrams[..., -1][..., None] == symbols[..., None, :]
    return (begins[..., None] & ends).any(-2)


def _recorded(
    search: _AttentionBeam, scoring: _Scoring, best: NBest
) -> tuple[_AttentionBeam, list[int]]:
    """Record complete hypotheses; also return which utterances go on."""
    covered = 0.0 if search.coverage is None else search.coverage.shares()
    complete = scoring.rank(search.scores, search.counts[:, None], covered)
    complete = complete.masked_fill(~search.ends, _NONE)
    row, column = (complete > search.best[:, -1:]).nonzero(as_tuple=True)
    if len(row):
        # The last label is the end.
        labels = search.labels[row, column, :-1]
        names, scores = search.names[row].tolist(), search.scores[row, column]
        best.add_rows(names, labels, scores, complete[row, column])
    ranks = torch.cat([search.best, complete], 1).topk(best.size).values
    scores = search.scores.masked_fill(search.ends, _NONE)
    highest = scores.max(1).values + (0.0 if scoring.boost is None else scoring.boost.largest)
    bound = scoring.rank(highest, search.limits + 1, 1.0)
    if scoring.boost is not None:
        # A score above 0, which only bonuses make, ranks lower the longer the transcript.
        bound = torch.maximum(bound, scoring.rank(highest, search.counts + 1, 1.0))
    going = bound > ranks[:, -1]
    return replace(search, best=ranks, scores=scores), going.nonzero()[:, 0].tolist()


def _results(best: NBest, limits: Sequence[int], *, with_alternatives: bool) -> list[Decoded]:
    results = []
    for hypotheses, limit in zip(best.lists, limits, strict=True):
        tokens = hypotheses[0].tokens if hypotheses else ()
        alternatives = tuple(hypotheses) if with_alternatives else ()
        truncated = bool(hypotheses) and len(tokens) == limit
        results.append(Decoded(tokens, truncated=truncated, alternatives=alternatives))
    return results
