"""The prefix tree: KV blocks of token runs that several sequences share.

Owns: ``Node`` (an immutable run of tokens and its keys and values) and ``PrefixTree`` (matching, splitting,
reference counts, least-recently-used eviction).  Refuses: serving a block under another *scope*.  A scope is a
tuple that starts with the weight version and the cache salt, so that a block can never cross either.

Lifecycle of a node: ``extend`` makes it pending (``kv is None``); the next forward pass allocates and fills it;
sequences hold references; without references and children it may be evicted.  ``clear`` forgets every scope:
running sequences keep the nodes that they reference, nobody else finds them again.

>>> tree = PrefixTree()
>>> node = tree.extend(tree.root(("v0", None)), np.array([1, 2, 3]))
>>> tree.match(("v0", None), np.array([1, 2, 3]))[1], tree.match(("v1", None), np.array([1, 2, 3]))[1]
(3, 0)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Tokens: TypeAlias = npt.NDArray[np.int64]
Scope: TypeAlias = tuple[Hashable, ...]

MIN_SPLIT = 8  # a shorter common run is recomputed: splitting copies the block and adds a node to every path


class Node:
    """Tokens ``[start, end)`` of every sequence whose path runs through this node.

    ``kv`` has shape (layers, 2, kv_heads, tokens, head_dim).  ``features`` is what the model's vocabulary
    projection needs to predict the token after the last one; None where nobody asked for it.
    ``routes`` (tokens, layers, top-k) are the experts that its tokens went to; None for models without routers.
    """

    __slots__ = ("children", "features", "kept", "kv", "parent", "refs", "routes", "start", "tokens", "used")

    def __init__(self, tokens: Tokens, parent: Node | None, kept: bool) -> None:
        self.tokens = tokens
        self.parent = parent
        self.start: int = parent.end if parent is not None else 0
        self.kept = kept
        self.children: list[Node] = []
        self.kv: torch.Tensor | None = None
        self.features: torch.Tensor | None = None
        self.routes: npt.NDArray[np.int16] | None = None
        self.refs = 0
        self.used = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def path(self) -> list[Node]:
        """This node and its ancestors, outermost first, without the empty root."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def _common(a: Tokens, b: Tokens) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


class PrefixTree:
    """All KV blocks, by scope."""

    def __init__(self) -> None:
        self._roots: dict[Scope, Node] = {}
        self._clock = 0
        self.tokens = 0
        """Tokens held in blocks, referenced or not."""
        self.splits = 0
        """How often a block was cut in two: whoever holds on to a node holds its tail since."""

    def root(self, scope: Scope, *, kept: bool = True) -> Node:
        """The empty node of a scope.  ``kept=False``: its blocks go as soon as nobody references them."""
        if scope not in self._roots:
            self._roots[scope] = Node(np.empty(0, np.int64), None, kept)
        return self._roots[scope]

    def match(self, scope: Scope, tokens: Tokens, *, kept: bool = True) -> tuple[Node, int]:
        """The deepest node whose path is a prefix of ``tokens``, and its length in tokens.

        Splits a node that agrees only in its first part.
        """
        node = self.root(scope, kept=kept)
        return self.descend(node, tokens)

    def descend(self, node: Node, tokens: Tokens) -> tuple[Node, int]:
        """Like ``match``, from ``node`` on; returns the number of ``tokens`` matched below it."""
        self._clock += 1
        node.used = self._clock
        matched = 0
        while matched < len(tokens):
            rest = tokens[matched:]
            best, length = None, 0
            for child in node.children:
                common = _common(child.tokens, rest)
                if common > length:
                    best, length = child, common
            if best is None or (length < len(best.tokens) and length < MIN_SPLIT):
                break
            node = best if length == len(best.tokens) else self._split(best, length)
            node.used = self._clock
            matched += length
        return node, matched

    def _split(self, node: Node, at: int) -> Node:
        """Put a new node before ``node`` that holds its first ``at`` tokens; ``node`` keeps its identity."""
        parent = node.parent
        assert parent is not None
        self.splits += 1
        front = Node(node.tokens[:at].copy(), parent, node.kept)
        front.children, front.used = [node], node.used
        parent.children[parent.children.index(node)] = front
        if node.kv is not None:
            # Copies, not views: a view would keep the whole block alive after half of it was evicted.
            front.kv, node.kv = node.kv[..., :at, :].clone(), node.kv[..., at:, :].clone()
        if node.routes is not None:
            front.routes, node.routes = node.routes[:at].copy(), node.routes[at:].copy()
        node.tokens, node.parent, node.start = node.tokens[at:].copy(), front, front.end
        return front

    def extend(self, parent: Node, tokens: Tokens, kv: torch.Tensor | None = None) -> Node:
        """Add a node below ``parent``; pending until its ``kv`` is filled."""
        node = Node(np.array(tokens, np.int64), parent, parent.kept)
        node.kv, node.used = kv, self._clock
        parent.children.append(node)
        self.tokens += len(tokens)
        return node

    def acquire(self, node: Node) -> None:
        """A sequence ends its path here; the path stays until ``release``."""
        node.refs += 1

    def release(self, node: Node) -> None:
        """Undo ``acquire``; a node of a forgotten or unkept scope goes at once."""
        node.refs -= 1
        if not node.kept:
            self._prune(node)

    def _prune(self, node: Node) -> None:
        while node.parent is not None and node.refs == 0 and not node.children:
            parent = node.parent
            self._drop(node)
            node = parent
        if node.parent is None and not node.children and node.refs == 0:
            self._roots = {scope: root for scope, root in self._roots.items() if root is not node}

    def _drop(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children.remove(node)
        self.tokens -= len(node.tokens)
        node.kv = node.features = node.routes = None

    def _leaves(self, node: Node) -> Iterator[Node]:
        stack = [node]
        while stack:
            top = stack.pop()
            stack.extend(top.children)
            if not top.children and top.parent is not None:
                yield top

    def evict(self, tokens: int) -> int:
        """Free at least ``tokens`` tokens of unreferenced blocks, oldest first, if there are so many."""
        freed = 0
        while freed < tokens:
            idle = [n for root in self._roots.values() for n in self._leaves(root) if n.refs == 0]
            if not idle:
                break
            for node in sorted(idle, key=lambda n: n.used):
                if freed >= tokens:
                    break
                freed += len(node.tokens)
                self._drop(node)
        return freed

    def clear(self) -> None:
        """Forget every scope; only blocks that running sequences reference stay, and only for them."""
        roots, self._roots = self._roots, {}
        for root in roots.values():
            stack, leaves = [root], list(self._leaves(root))
            while stack:
                node = stack.pop()
                node.kept = False
                stack.extend(node.children)
            for leaf in leaves:
                self._prune(leaf)
