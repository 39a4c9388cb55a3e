"""The hashes of the session policies: MurmurHash64A, FurcHash, and their composition.

Owns: bit-exact 64-bit arithmetic.  Refuses: knowing replicas.

Sources: MurmurHash64A is Austin Appleby's (public domain).  FurcHash is the consistent hash of Facebook's mcrouter
(``mcrouter/lib/fbi/hash.c``): it walks the bits of a chain of murmur hashes and needs no table.  ``ring_hash`` puts
FurcHash over 2**23 - 1 buckets through murmur once more, as ``vllm-router`` does for its ring and its tie breaks.

>>> f"{murmur64a(b'hello', 0):016x}"
'1e68d17c457bf117'
>>> furc_hash("anything", 1)
0
"""

from __future__ import annotations

from functools import lru_cache

_MASK = (1 << 64) - 1
_M = 0xC6A4A7935BD1E995
_R = 47
_SEED = 4193360111
_SHIFT = 23
_TRIES = 32
_BUCKETS = (1 << 23) - 1


def _mix(word: int) -> int:
    word = word * _M & _MASK
    word ^= word >> _R
    return word * _M & _MASK


def murmur64a(key: bytes, seed: int) -> int:
    """MurmurHash64A of ``key``: 64 bits."""
    value = (seed ^ (len(key) * _M)) & _MASK
    whole = len(key) & ~7
    for at in range(0, whole, 8):
        value ^= _mix(int.from_bytes(key[at : at + 8], "little"))
        value = value * _M & _MASK
    if whole < len(key):
        value ^= int.from_bytes(key[whole:], "little")
        value = value * _M & _MASK
    value ^= value >> _R
    value = value * _M & _MASK
    return value ^ (value >> _R)


class _Bits:
    """Bit ``i`` of an endless chain: murmur of the key, then murmur of the previous 64 bits."""

    def __init__(self, key: bytes) -> None:
        self._words = [murmur64a(key, _SEED)]

    def __call__(self, index: int) -> int:
        words = self._words
        while len(words) <= index >> 6:
            words.append(murmur64a(words[-1].to_bytes(8, "little"), _SEED))
        return words[index >> 6] >> (index & 63) & 1


def furc_hash(key: str, buckets: int) -> int:
    """A bucket in ``[0, buckets)``; going from n to n + 1 buckets moves about 1/(n + 1) of the keys."""
    if buckets <= 1:
        return 0
    bit = _Bits(key.encode())
    depth = (buckets - 1).bit_length()
    at = depth
    for _ in range(_TRIES):
        while not bit(at):
            if depth == 0:
                return 0
            depth -= 1
            at = depth
        at += _SHIFT
        number = 1
        for _ in range(depth - 1):
            number = number << 1 | bit(at)
            at += _SHIFT
        if number < buckets:
            return number
    return 0


@lru_cache(maxsize=1 << 16)
def ring_hash(key: str) -> int:
    """Where a key lies on the ring of 2**64 places."""
    return murmur64a(furc_hash(key, _BUCKETS).to_bytes(4, "little"), _SEED)
