"""Finds where the lanes of a warp reconverge after a divergent branch."""

from __future__ import annotations


def meetings(after: list[list[int]]) -> list[int]:
    """Return the immediate post-dominator of each instruction: the first one on every path."""
    end = len(after)
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for number, others in enumerate(after):
        for other in others:
            before[other].append(number)
    order = _postorder(before, end)
    rank = {node: number for number, node in enumerate(order)}
    meeting = {end: end}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [other for other in after[node] if other in meeting]
            found = known[0]
            for other in known[1:]:
                found = _common(found, other, rank, meeting)
            changed |= meeting.get(node) != found
            meeting[node] = found
    return [meeting.get(number, end) for number in range(end)]


def _common(a: int, b: int, rank: dict[int, int], meeting: dict[int, int]) -> int:
    while a != b:
        while rank[a] < rank[b]:
            a = meeting[a]
        while rank[b] < rank[a]:
            b = meeting[b]
    return a


def _postorder(before: list[list[int]], end: int) -> list[int]:
    """Return the instructions from which the end is reachable; the end is last."""
    order, stack, seen = [], [(end, iter(before[end]))], {end}
    while stack:
        node, rest = stack[-1]
        other = next((x for x in rest if x not in seen), None)
        if other is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(other)
            stack.append((other, iter(before[other])))
    return order
