"""Phrase boosting: a prefix tree of phrases in pieces, whose bonuses are added to the scores."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from effasr.data.prompt import WITHOUT_SPACES
from effasr.data.tokenizer import Tokenizer
from effasr.untrusted.display import escape_line
from effasr.untrusted.files import read_text

_ROOT = 0


class BoostTree:
    """Bonuses of phrases by an Aho-Corasick automaton, whose state is one integer for a hypothesis.

    A text gains ``weight * tokens`` of each phrase in it. Where phrases overlap, the one that
    begins first counts, and of those the longest, so that no token counts twice. The tokens of a
    phrase gain their shares as they come, and lose them where it breaks off; then the tokens after
    its first are searched for other phrases. A state is the node of the tree that the last tokens
    have reached; 0 is that of no tokens.

    A row of scores is one vector for all states plus a number of each state, except for the arcs of
    the state, so that memory is linear in the tokens of the phrases.
    """

    def __init__(
        self,
        phrases: Mapping[tuple[int, ...], float],  # nats a token, above 0
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.vocab_size = vocab_size
        nodes = _Nodes(phrases)
        self.largest = max(nodes.credits)  # the most that an unfinished phrase can have
        arcs = nodes.arcs()
        first, arcs[_ROOT] = arcs[_ROOT], {}
        # Padding is a column that no row of scores shows.
        widest = max(1, *map(len, arcs))
        tokens = torch.full((len(arcs), widest), vocab_size + 1)
        scores, targets = torch.zeros(len(arcs), widest), torch.full_like(tokens, -1)
        for node, row in enumerate(arcs):
            if row:
                count = len(row)
                tokens[node, :count] = torch.tensor(list(row))
                scores[node, :count] = torch.tensor([score for score, _ in row.values()])
                targets[node, :count] = torch.tensor([target for _, target in row.values()])
        first_scores = torch.zeros(vocab_size + 2)
        first_targets = torch.zeros(vocab_size, dtype=torch.int64)
        for token, (score, target) in first.items():
            first_scores[token], first_targets[token] = score, target
        self._tokens, self._scores = tokens.to(device), scores.to(device)
        self._targets = targets.to(device)
        self._first_scores = first_scores.to(device)
        self._first_targets = first_targets.to(device)
        self._returned = torch.tensor(nodes.returned, dtype=torch.float32, device=device)

    def rows(self, states: Tensor) -> Tensor:
        """Return the bonuses of all tokens and, last, of the end, float32 (..., V + 1)."""
        flat = states.flatten()
        rows = self._first_scores + self._returned[flat][:, None]
        rows.scatter_(1, self._tokens[flat], self._scores[flat])
        return rows[:, :-1].unflatten(0, states.shape)

    def scores(self, states: Tensor, symbols: Tensor) -> Tensor:
        """Return those of symbols (..., C) and, last, of the end, float32 (..., C + 1)."""
        end = torch.full_like(states, self.vocab_size)[..., None]
        return self.rows(states).gather(-1, torch.cat([symbols, end], -1))

    def ends(self, states: Tensor) -> Tensor:
        """Return the bonus of the end, float32 (...), at most 0: of what is not complete."""
        return self._returned[states]

    def advanced(self, states: Tensor, symbols: Tensor) -> Tensor:
        """Return the states after symbols (...); ids that are no tokens change nothing."""
        same = self._tokens[states] == symbols[..., None]
        target = self._targets[states].masked_fill(~same, -1).amax(-1)
        is_token = (symbols >= 0) & (symbols < self.vocab_size)
        first = self._first_targets[symbols.masked_fill(~is_token, 0)]
        return torch.where(is_token, torch.where(target < 0, first, target), states)

    def likeliest(self, logits: Tensor, states: Tensor, last: Tensor | None = None) -> Tensor:
        """Choose the best symbol (N,) of tokens and, last, the blank, (N, V + 1).

        The blank has no bonus, and neither has ``last``, int64 (N,), the symbol before, which may
        go on without being another token. They are compared with what tokens gain, not with what
        these lose, or a phrase that breaks off would delete the token that follows it.
        """
        logits, bonuses = logits.float(), self.rows(states)[:, :-1]
        stays = torch.arange(logits.shape[1], device=logits.device) == self.vocab_size
        stays = stays.expand_as(logits)
        if last is not None:
            stays = stays.scatter(1, last[:, None], True)
        tokens = logits.masked_fill(stays, -torch.inf)[:, :-1]
        staying, symbol = logits.masked_fill(~stays, -torch.inf).max(-1)
        gained = (tokens + bonuses.clamp(min=0)).amax(-1)
        return torch.where(gained > staying, (tokens + bonuses).argmax(-1), symbol)


class _Nodes:
    """The nodes of a prefix tree, numbered from the root."""

    def __init__(self, phrases: Mapping[tuple[int, ...], float]) -> None:
        self.paths: list[tuple[int, ...]] = [()]
        self.children: list[dict[int, int]] = [{}]
        self.credits = [0.0]  # what the tokens of a node have gained
        self._bonuses = [0.0]  # of the phrase that ends here; 0 if none does
        for phrase, weight in phrases.items():
            node = _ROOT
            for depth, token in enumerate(phrase, 1):
                if token not in self.children[node]:
                    self.children[node][token] = len(self.paths)
                    self.paths.append(tuple(phrase[:depth]))
                    self.children.append({})
                    self.credits.append(0.0)
                    self._bonuses.append(0.0)
                node = self.children[node][token]
                self.credits[node] = max(self.credits[node], weight * depth)
            self._bonuses[node] = max(self._bonuses[node], weight * len(phrase))
        # Where the search for phrases goes on if none continues the node, and the change of the
        # score on the way.
        self._next = [(0.0, _ROOT)] * len(self.paths)
        # The change of the score if no phrase continues the node or any of its suffixes.
        self.returned = [0.0] * len(self.paths)
        self._by_depth = sorted(range(1, len(self.paths)), key=lambda node: len(self.paths[node]))
        for node in self._by_depth:
            change, target = self._next[node] = self._failure(node)
            self.returned[node] = change + self.returned[target]

    def _failure(self, node: int) -> tuple[float, int]:
        path, length, bonus, walk = self.paths[node], 1, 0.0, _ROOT
        for depth, token in enumerate(path, 1):
            walk = self.children[walk][token]
            if self._bonuses[walk]:
                length, bonus = depth, self._bonuses[walk]
        state = _ROOT
        for token in path[length:]:
            change, state = self._step(state, token)
            bonus += change
        return bonus - self.credits[node], state

    def _step(self, state: int, token: int) -> tuple[float, int]:
        score = 0.0
        while token not in self.children[state] and state != _ROOT:
            change, state = self._next[state]
            score += change
        target = self.children[state].get(token, _ROOT)
        return score + self.credits[target] - self.credits[state], target

    def arcs(self) -> list[dict[int, tuple[float, int]]]:
        """Return the score and target of each token of each node, where they are not the root's."""
        rows: list[dict[int, tuple[float, int]]] = [{} for _ in self.paths]
        for node in (_ROOT, *self._by_depth):
            change, target = self._next[node]
            if target != _ROOT:
                rows[node] = {token: (change + s, to) for token, (s, to) in rows[target].items()}
            for token, child in self.children[node].items():
                rows[node][token] = self.credits[child] - self.credits[node], child
        return rows


def read_phrases(
    path: str | Path, tokenizer: Tokenizer, weight: float
) -> dict[tuple[int, ...], float]:
    """Read phrases, one a line, with an optional tab and weight; return their tokens and weights.

    A phrase has every spelling that the tokenizer may give it within a text: as it is and in lower
    case, in each language, and with and without the mark of the beginning of a word where texts
    have no spaces.
    """
    phrases: dict[tuple[int, ...], float] = {}
    text = read_text(Path(path)).removeprefix("\ufeff")
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        origin = f"{path}:{number}"
        phrase, _, after = line.partition("\t")
        if not phrase.strip():
            raise ValueError(f"{origin}: must have a phrase before the tab: remove the line.")
        value = _weight(after.strip(), origin) if after.strip() else weight
        spellings = _spellings(phrase.strip(), tokenizer)
        if not spellings:
            raise ValueError(
                f"{origin}: the tokenizer must be able to spell each phrase, but "
                f"{escape_line(phrase[:40])!r} has characters that it does not know: write it with "
                "those that transcripts have."
            )
        for spelling in spellings:
            phrases[spelling] = max(value, phrases.get(spelling, value))
    if not phrases:
        raise ValueError(f"{path}: must have at least one phrase: add one, or leave out `boost`.")
    return phrases


def _weight(text: str, origin: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(
            f"{origin}: the weight after the tab must be above 0, in nats a token, but is "
            f"{escape_line(text[:40])!r}: give a number such as 1.5, or leave out the tab."
        )
    return value


def _spellings(phrase: str, tokenizer: Tokenizer) -> set[tuple[int, ...]]:
    pieces, specials = tokenizer.pieces(), set(tokenizer.specials.values())
    ids = {piece: number for number, piece in enumerate(pieces)}
    spellings: set[tuple[int, ...]] = set()
    # Byte-level pieces begin a word only after a space.
    forms = [space + form for form in (phrase, phrase.lower()) for space in ("", " ")]
    for language in tokenizer.languages or ("en",):
        for form in forms:
            tokens = tuple(tokenizer.encode(form, language))
            if not tokens or tokenizer.count_unknown(tokens) or specials & set(tokens):
                continue
            spellings.add(tokens)
            # Only the first word of such a text has a mark.
            unmarked = pieces[tokens[0]].removeprefix("▁")
            if language in WITHOUT_SPACES and (not unmarked or unmarked in ids):
                spellings.add(((ids[unmarked],) if unmarked else ()) + tokens[1:])
    return spellings - {()}
