"""``PrefixTree``: which replicas have seen the longest prefix of a prompt.

Owns: a radix tree over token ids whose nodes remember who has seen them.  Refuses: eviction (the real router evicts by
size every two minutes; a simulated hour stays below its limit of 2**25 per replica).

>>> tree = PrefixTree()
>>> tree.insert((1, 2, 3, 4), "a"); tree.insert((1, 2, 9, 9), "b")
>>> tree.match((1, 2, 3, 5))
(frozenset({'a'}), 3)
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class _Node:
    ids: tuple[int, ...]
    seen_by: set[str]
    children: dict[int, _Node] = field(default_factory=dict)


def _shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while low < high:  # the common prefix of [0, low) holds
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixTree:
    """See the module."""

    def __init__(self) -> None:
        self._root = _Node((), set())

    def insert(self, ids: tuple[int, ...], replica: str) -> None:
        """``replica`` has seen ``ids``."""
        node = self._root
        node.seen_by.add(replica)
        at = 0
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                node.children[ids[at]] = _Node(ids[at:], {replica})
                return
            shared = _shared(ids[at : at + len(child.ids)], child.ids)
            if shared < len(child.ids):
                upper = _Node(child.ids[:shared], set(child.seen_by))
                child.ids = child.ids[shared:]
                upper.children[child.ids[0]] = child
                node.children[ids[at]] = upper
                child = upper
            child.seen_by.add(replica)
            node = child
            at += shared

    def match(self, ids: tuple[int, ...]) -> tuple[frozenset[str], int]:
        """Who has seen the deepest node that ``ids`` reaches, and how many tokens matched."""
        node, at = self._root, 0
        while at < len(ids):
            child = node.children.get(ids[at])
            if child is None:
                break
            shared = _shared(ids[at : at + len(child.ids)], child.ids)
            at += shared
            node = child
            if shared < len(child.ids):
                break
        return frozenset(node.seen_by), at

    def remove(self, replica: str) -> None:
        """Forget a replica; prompts that only it has seen go."""
        stack = [self._root]
        order = []
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(node.children.values())
        for node in reversed(order):  # children before their parents
            node.seen_by.discard(replica)
            node.children = {key: child for key, child in node.children.items() if child.seen_by}
