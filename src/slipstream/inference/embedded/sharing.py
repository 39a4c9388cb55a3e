"""Which blocks decoding sequences read together, and which they copy into their own rows.

Owns: ``row_starts``, a pure function.  Refuses: moving anything.

Reading a block once for ``m`` sequences saves ``(m - 1) * tokens`` token reads in each layer and costs a handful of
operators.  The best choice is found exactly: a node can be shared only below shared nodes (a row is contiguous), so
a subtree is worth its own gain plus that of its children that are worth anything.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from slipstream.inference.embedded.prefix import Node

SHARE_COST = 3000
"""Token reads that one more block costs per layer (about 0.2 ms on two CPU cores); it only affects speed."""


def row_starts(leaves: Seq[Node], cost: int = SHARE_COST) -> list[int]:
    """For each sequence, the position at which its private row should begin (the end of its last shared block)."""
    paths = [leaf.path() for leaf in leaves]
    users: dict[int, int] = {}
    nodes: dict[int, Node] = {}
    for path in paths:
        for node in path:
            nodes[id(node)] = node
            users[id(node)] = users.get(id(node), 0) + 1
    below: dict[int, int] = {}
    gain: dict[int, int] = {}
    for key, node in sorted(nodes.items(), key=lambda item: -item[1].start):
        gain[key] = len(node.tokens) * (users[key] - 1) - cost + below.get(key, 0)
        if node.parent is not None and gain[key] > 0:
            below[id(node.parent)] = below.get(id(node.parent), 0) + gain[key]
    starts = []
    for path in paths:
        start = 0
        for node in path:
            if gain[id(node)] <= 0:
                break
            start = node.end
        starts.append(start)
    return starts
