"""Beam search with the attention decoder, over all hypotheses of a batch at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from effasr.decoding.coverage import Coverage
from effasr.decoding.ctc_prefix_scorer import CTCPrefixScorer
from effasr.decoding.decoded import Decoded
from effasr.decoding.lm.ngram import TokenLM
from effasr.decoding.nbest.hypothesis import NBest
from effasr.decoding.repetition import repeats_ngram
from effasr.decoding.suppression import FORBIDDEN, Suppression
from effasr.model.asr import ASRModel
from effasr.nn.cache.decoder_state import KEPT_SHARE
from effasr_kernels import PackedSequence

_NONE = -torch.inf

_FEWEST_CANDIDATES = 8
"""Tokens of each hypothesis where something else than the decoder has a say, or twice the beam if
more."""


def attention_beam(
    model: ASRModel,
    encoded: PackedSequence,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    eos_id: int,
    classes: int | None = None,
    *,
    beam: int,
    length_penalty: float = 0.0,
    coverage_penalty: float = 0.0,
    ctc_weight: float = 0.0,
    no_repeat_ngram: int | None = None,
    lm: TokenLM | None = None,
    lm_weight: float = 0.0,
    nbest: int | None = None,
) -> list[Decoded]:
    """Find a transcript with a high score for each sequence of encoder output.

    Each step extends every hypothesis by every token and by the end token, and keeps the best
    ``beam``; complete hypotheses leave the beam. With a beam of 1 and without CTC this is greedy
    search; with a large beam it is exact. A hypothesis with score s and n tokens, the end included,
    ranks by ``s / ((5 + n) / 6) ** length_penalty``. An utterance is finished when nothing in its
    beam can outrank its best complete hypothesis: scores only fall, and the largest divisor is that
    at the limit, where every hypothesis ends.

    With ``coverage_penalty`` b, ranks gain b times the share of covered frames (see `Coverage`),
    and the beam keeps the best ranks; unfinished hypotheses are assumed to cover all frames in the
    end.

    With ``ctc_weight`` w, a score is (1 - w) times the decoder's log-probability plus w times the
    CTC prefix score, over the tokens that the decoder ranks highest. ``lm_weight`` times the
    log-probability of the language model is added (shallow fusion).

    With ``nbest`` N, the search goes on until nothing can outrank the N-th best complete
    hypothesis.

    With ``no_repeat_ngram`` n, no token ends an n-gram that its transcript has already. Where every
    token that the decoder ranks highest would, the transcript ends.

    Args:
        model: Model with a decoder, and for ``ctc_weight`` with a CTC head.
        encoded: (T, C), from ``model.encode``; sequences past ``len(prompts)`` are not decoded.
        prompts: At least one token each; they may differ in length.
        limits: Most tokens of each transcript after its prompt, at least one.
        eos_id: The end token.
        classes: Number of the model's classes that are tokens; all by default.
        beam: K, hypotheses of each sequence.
        length_penalty: 0 for the likeliest transcript; more favours longer ones.
        coverage_penalty: Weight of coverage, at least 0; more favours transcripts that omit less
            speech.
        ctc_weight: Weight of CTC, from 0 to 1.
        no_repeat_ngram: n, at least 2; None to allow all repetitions.
        lm: Language model over the same tokens; None for no language model.
        lm_weight: Weight of the language model, at least 0.
        nbest: Alternatives of each result, the transcript itself included; None for none.

    Returns:
        One result for each prompt.

    References:
        Wu et al., 2016, https://arxiv.org/abs/1609.08144 (length and coverage penalty); Chorowski
        and Jaitly, 2017, https://arxiv.org/abs/1612.02695 (coverage); Watanabe et al., 2017,
        https://doi.org/10.1109/JSTSP.2017.2763455 (joint scores).
    """
    if not prompts:
        return []
    found = NBest(len(prompts), nbest or 1)
    classes = model.vocab_size if classes is None else classes
    alone = ctc_weight == 0 and lm is None and no_repeat_ngram is None
    candidates = min(beam if alone else max(_FEWEST_CANDIDATES, 2 * beam), classes - 1)
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
        Suppression.of(model.decoder, classes),
        no_repeat_ngram,
    )
    room = max(len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True))
    # For prompts longer than the shortest, later steps read the rest.
    shortest = min(map(len, prompts))
    state = model.start_decoding(encoded, room, [prompt[: shortest - 1] for prompt in prompts])
    search = _Search.begin(
        model,
        encoded,
        prompts,
        limits,
        beam,
        found.size,
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
        search, going = _recorded(search, scoring, found)
        if not going:
            return _results(found, limits, with_alternatives=nbest is not None)
        if beam > 1:
            state.reorder(parents)
        if len(going) <= KEPT_SHARE * len(search.names):
            state.keep(going)
            search = search.keep(torch.tensor(going, device=search.names.device))


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Scoring and ranking of hypotheses; see `attention_beam`.

    ``candidates`` is C, the number of tokens that may extend a hypothesis.
    """

    eos_id: int
    classes: int
    candidates: int
    length_penalty: float
    coverage_penalty: float
    ctc_weight: float
    lm: TokenLM | None
    lm_weight: float
    suppression: Suppression | None
    no_repeat_ngram: int | None

    def rank(self, scores: Tensor, tokens: Tensor, covered: Tensor | float) -> Tensor:
        """Return ranks of hypotheses from scores, token counts and shares of covered frames."""
        ranks = scores / ((5 + tokens) / 6) ** self.length_penalty
        return ranks + self.coverage_penalty * covered if self.coverage_penalty else ranks

    def score(self, spoken: Tensor, heard: Tensor | None, written: Tensor) -> Tensor:
        """Weighted sum of log-probabilities of the decoder, of CTC, and of the language model."""
        score = spoken
        if heard is not None:
            score = (1 - self.ctc_weight) * score + self.ctc_weight * heard
        return score if self.lm is None else score + self.lm_weight * written


@dataclass(frozen=True, slots=True)
class _Search:
    """N utterances with K hypotheses each; one with a score of -inf is an empty place.

    Attributes:
        names: int64 (N,), the number of each utterance in the batch.
        prompts: int64 (N, longest), padded.
        starts: int64 (N,), tokens of each prompt.
        limits: int64 (N,), of tokens after it.
        counts: int64 (N,), tokens after the prompt so far; 0 while the prompt is being read.
        best: float64 (N, nbest), ranks of the best complete hypotheses so far, the best first.
        scores: float64 (N, K).
        spoken: float64 (N, K), log-probabilities of the decoder; finite for empty places, too.
        written: float64 (N, K), log-probabilities of the language model, or 0.
        tokens: int64 (N, K), to be read next.
        labels: int64 (N, K, steps), the tokens so far; -1 in steps that read a prompt.
        ends: bool (N, K), whether the hypothesis has just ended.
        ctc: CTC scores of the hypotheses; None without CTC.
        coverage: Attention of the hypotheses; None without coverage penalty.
    """

    names: Tensor
    prompts: Tensor
    starts: Tensor
    limits: Tensor
    counts: Tensor
    best: Tensor
    scores: Tensor
    spoken: Tensor
    written: Tensor
    tokens: Tensor
    labels: Tensor
    ends: Tensor
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
    ) -> _Search:
        """Return one hypothesis without tokens for each of these utterances."""
        device, shape = encoded.values.device, (len(prompts), beam)
        starts = [len(prompt) for prompt in prompts]
        frames = encoded.layout.lengths[: len(prompts)]
        padded = [[*prompt, *[0] * (max(starts) - len(prompt))] for prompt in prompts]
        table = torch.tensor(padded, device=device)
        spoken = torch.zeros(shape, dtype=torch.float64, device=device)
        scores = spoken + _NONE
        scores[:, 0] = 0
        return cls(
            names=torch.arange(len(prompts), device=device),
            prompts=table,
            starts=torch.tensor(starts, device=device),
            limits=torch.tensor(limits, device=device),
            counts=torch.zeros_like(table[:, 0]),
            best=spoken.new_full((len(prompts), nbest), _NONE),
            scores=scores,
            spoken=spoken,
            written=torch.zeros_like(spoken),
            tokens=table[:, min(starts) - 1, None].repeat(1, beam),
            labels=table.new_empty(*shape, 0),
            ends=torch.zeros(shape, dtype=torch.bool, device=device),
            ctc=CTCPrefixScorer.begin(model, encoded, len(prompts), beam) if ctc else None,
            coverage=Coverage.begin(frames, beam, device) if coverage else None,
        )

    def keep(self, index: Tensor) -> _Search:
        """These utterances alone, int64 (M,)."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        whole = {name: parts.pop(name) for name in ("ctc", "coverage")}
        kept = {name: part[index] for name, part in parts.items()}
        kept |= {name: None if part is None else part.keep(index) for name, part in whole.items()}
        return _Search(**kept)

    def shares(self) -> Tensor | float:
        """Return the share of frames that each hypothesis covers, float64 (N, K), if it is used."""
        return 0.0 if self.coverage is None else self.coverage.shares()


def _advance(
    logits: Tensor, search: _Search, scoring: _Scoring, position: int
) -> tuple[_Search, Tensor]:
    """Extend every hypothesis by tokens and by the end, and keep the K best.

    Args:
        logits: (N K, V), after ``position`` tokens.
        search: Search before the step; its hypotheses have not ended.
        scoring: Weights of the scores.
        position: Tokens that were read, the prompt's included.

    Returns:
        The search after the step, and the row that each of its hypotheses comes from, int64 (N K,).
    """
    count, beam = search.scores.shape
    begins = (search.starts == position).repeat_interleave(beam)
    symbols, steps, end = _candidates(logits, scoring, begins, count)
    spoken = torch.cat([search.spoken[..., None] + steps, (search.spoken + end)[..., None]], -1)
    heard = None
    if search.ctc is not None:
        heard = torch.cat([search.ctc.extended(symbols), search.ctc.complete()[..., None]], -1)
    written = search.written[..., None].expand_as(spoken)
    if scoring.lm is not None:
        written = written + scoring.lm.scores(search.labels[:, :, -scoring.lm.order :], symbols)
    pool = scoring.score(spoken, heard, written)
    if scoring.suppression is not None:
        pool = pool.masked_fill(spoken <= FORBIDDEN / 2, _NONE)
    pool = pool.masked_fill(search.scores[..., None] == _NONE, _NONE)
    if scoring.no_repeat_ngram is not None:
        repeated = repeats_ngram(search.labels, symbols, scoring.no_repeat_ngram)
        pool[..., :-1].masked_fill_(repeated, _NONE)
    full = search.counts >= search.limits
    pool[..., :-1].masked_fill_(full[:, None, None], _NONE)
    counts = (position + 1 - search.starts).clamp(min=0)
    coverage = search.coverage
    if coverage is None:
        scores, chosen = pool.flatten(1).topk(beam)
    else:
        # All have the same number of tokens, so without coverage the scores determine the ranks.
        ranks = scoring.rank(pool, counts[:, None, None], coverage.shares()[..., None])
        chosen = ranks.flatten(1).topk(beam).indices
        scores = pool.flatten(1).gather(1, chosen)
    parent, which = chosen // pool.shape[-1], chosen % pool.shape[-1]
    # Prompt tokens are read by the one real hypothesis and its empty neighbours.
    reading = (search.starts > position)[:, None]
    parent = torch.where(reading, torch.arange(beam, device=parent.device), parent)
    ends = (which == scoring.candidates) & ~reading
    symbol = torch.where(ends, scoring.eos_id, _pick(symbols, parent, which))
    label = torch.where(reading, -1, symbol)
    ctc = search.ctc
    if ctc is not None:
        ctc = ctc.advanced(parent, label)
    following = search.prompts[:, min(position, search.prompts.shape[1] - 1), None]
    first = torch.arange(count, device=parent.device)[:, None]
    after = replace(
        search,
        counts=counts,
        scores=torch.where(reading, search.scores, scores),
        spoken=torch.where(reading, search.spoken, spoken.flatten(1).gather(1, chosen)),
        written=torch.where(reading, search.written, written.flatten(1).gather(1, chosen)),
        tokens=torch.where(reading, following, symbol),
        labels=torch.cat([search.labels[first, parent], label[..., None]], -1),
        ends=ends,
        ctc=ctc,
        coverage=None if coverage is None else coverage.reordered(parent),
    )
    return after, (first * beam + parent).flatten()


def _candidates(
    logits: Tensor, scoring: _Scoring, begins: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best tokens, int64 and float64 (N, K, C), and the end's scores, (N, K)."""
    logits = logits[:, : scoring.classes].float()
    total = logits.logsumexp(-1).double()
    if scoring.suppression is not None:
        # Suppression after normalisation, as in transformers: other tokens keep their probability.
        logits = scoring.suppression.applied(logits, begins)
    end = logits[:, scoring.eos_id].double() - total
    others = logits.index_fill(1, torch.tensor([scoring.eos_id], device=logits.device), _NONE)
    # float64 differences keep the order of the logits; float32 ones might not.
    values, symbols = others.topk(scoring.candidates)
    steps = values.double() - total[:, None]
    return symbols.unflatten(0, (count, -1)), steps.unflatten(0, (count, -1)), end.view(count, -1)


def _pick(symbols: Tensor, parent: Tensor, which: Tensor) -> Tensor:
    """Return the chosen candidates of the parents, int64 (N, K); arbitrary if the end is chosen."""
    number = torch.arange(len(symbols), device=symbols.device)[:, None]
    return symbols[number, parent, which.clamp(max=symbols.shape[-1] - 1)]


def _recorded(search: _Search, scoring: _Scoring, found: NBest) -> tuple[_Search, list[int]]:
    """Record complete hypotheses; also return which utterances go on."""
    complete = scoring.rank(search.scores, search.counts[:, None], search.shares())
    complete = complete.masked_fill(~search.ends, _NONE)
    row, place = (complete > search.best[:, -1:]).nonzero(as_tuple=True)
    if len(row):
        # The last label is the end.
        labels = search.labels[row, place, :-1]
        names, scores = search.names[row].tolist(), search.scores[row, place]
        found.add_rows(names, labels, scores, complete[row, place])
    best = torch.cat([search.best, complete], 1).topk(found.size).values
    scores = search.scores.masked_fill(search.ends, _NONE)
    going = scoring.rank(scores.max(1).values, search.limits + 1, 1.0) > best[:, -1]
    return replace(search, best=best, scores=scores), going.nonzero()[:, 0].tolist()


def _results(found: NBest, limits: Sequence[int], *, with_alternatives: bool) -> list[Decoded]:
    """Return the best hypothesis of each utterance, and the others if they are requested."""
    results = []
    for hypotheses, limit in zip(found.lists(), limits, strict=True):
        tokens = hypotheses[0].tokens if hypotheses else ()
        alternatives = tuple(hypotheses) if with_alternatives else ()
        truncated = bool(hypotheses) and len(tokens) == limit
        results.append(Decoded(tokens, truncated=truncated, alternatives=alternatives))
    return results
