"""Packets: what changed between two versions of the weights, in as few bytes as can be, and provably whole.

Owns: the codec (exact differences of bit patterns), the packet file, applying packets to a ``Mirror``, joining several
packets into one.
Refuses: deciding what to send (``slipstream.weights.delta``); floating-point arithmetic: values are bit patterns, so
the reconstruction is exact for every dtype.

An *anchor* holds whole tensors and needs no base.  A *delta* holds, per tensor, the difference of its elements taken
as unsigned integers, modulo the word: in sorted order of their positions (few changes) or densely (many).  An optimiser
step moves most bfloat16 weights by no or by one unit in the last place, so a difference is a small number; zigzag
and a split into byte planes make it one that Zstandard packs to a bit or two.

A packet refuses to be applied to anything but the version *and content* that it was made from.  Blocks carry a CRC-32,
checked before anything is touched; every tensor's checksum is checked after.  Should that fail, the mirror is lost: it
says so and takes nothing but an anchor.

>>> import numpy as np, tempfile, pathlib
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> old, new = ({"w": Raw.of(np.array([1, 2, n], np.float32))} for n in (3, 4))
>>> _ = write_anchor(folder / "a", old, "v0"), write_delta(folder / "d", old, new, "v0", "v1")
>>> mirror = Mirror()
>>> mirror.apply(folder / "a"), mirror.apply(folder / "d")
(True, True)
>>> mirror.version, mirror.tensors["w"].numpy().tolist()
('v1', [1.0, 2.0, 4.0])
>>> mirror.apply(folder / "d")  # a duplicate changes nothing
False
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from slipstream.errors import InferenceError
from slipstream.inference.checksum import crc32
from slipstream.inference.transfer.raw import THREADS, Bytes, Raw, checksums, digest, item_size

FORMAT = "slipstream-packet/1"
_DENSE_SHARE = 0.25
"""Share of changed elements above which positions cost more than they save."""
_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Words = npt.NDArray[Any]
T = TypeVar("T")
S = TypeVar("S")


@dataclass(frozen=True)
class Block:
    """One tensor in a packet.

    ``mode``: ``same`` (no bytes), ``whole`` (raw), ``sparse`` (gaps between changed positions in words of ``gap``
    bytes, then differences) or ``dense`` (differences).  ``crc`` covers the block as stored, ``checksum`` the tensor
    after it was applied.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    mode: Literal["same", "whole", "sparse", "dense"]
    checksum: str
    count: int = 0
    gap: int = 0
    crc: int = 0

    @property
    def word(self) -> int:
        """Bytes per element."""
        return item_size(self.dtype)

    @property
    def packed(self) -> int:
        """Bytes of the block before compression."""
        return self.count * (self.word + (self.gap if self.mode == "sparse" else 0))


@dataclass(frozen=True)
class Header:
    """What a packet says of itself.  ``base`` is None for an anchor; digests are of the whole set of weights."""

    version: str
    digest: str
    base: str | None
    base_digest: str | None
    blocks: tuple[Block, ...]


def _each(function: Callable[[S], T], items: Iterable[S]) -> list[T]:
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(function, items))


# ---- differences


def _words(raw: Raw) -> Words:
    return raw.data.view(_WORDS[item_size(raw.dtype)])


def _planes(values: Words) -> bytes:
    """The bytes of the values, all lowest first."""
    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _unplaned(data: Bytes, word: int) -> Words:
    return np.ascontiguousarray(data.reshape(word, -1).T).reshape(-1).view(_WORDS[word])


def _zigzag(difference: Words) -> Words:
    """Small differences of either sign as small numbers."""
    signed = difference.view(f"i{difference.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * difference.itemsize - 1))).view(difference.dtype)


def _unzigzag(values: Words) -> Words:
    one = values.dtype.type(1)
    # In modular arithmetic ~(v & 1) + 1 is -(v & 1): all ones for an odd value.
    signed: Words = (values >> one) ^ (~(values & one) + one)
    return signed


def _codec() -> Any:
    return pa.Codec("zstd", compression_level=1)


def _pack(name: str, like: Raw, difference: Words, checksum: str) -> tuple[Block, Bytes | None]:
    """One tensor's difference as a block."""
    changed = np.flatnonzero(difference != 0)
    if not changed.size:
        return Block(name, like.dtype, like.shape, "same", checksum), None
    if changed.size > _DENSE_SHARE * difference.size:
        mode: Literal["sparse", "dense"] = "dense"
        gap, body, count = 0, _planes(_zigzag(difference)), difference.size
    else:
        mode, count = "sparse", changed.size
        gaps = np.diff(changed, prepend=-1) - 1
        gap = next(size for size in (1, 2, 4, 8) if int(gaps.max()) < 1 << (8 * size))
        body = _planes(gaps.astype(_WORDS[gap])) + _planes(_zigzag(difference[changed]))
    stored = np.frombuffer(_codec().compress(body), np.uint8)
    return Block(name, like.dtype, like.shape, mode, checksum, count, gap, crc32(stored.data)), stored


def _unpack(block: Block, stored: Bytes) -> tuple[npt.NDArray[np.int64] | None, Words]:
    """``(positions or None for all, differences)``."""
    body = np.frombuffer(_codec().decompress(stored, block.packed), np.uint8)
    if block.mode == "dense":
        return None, _unzigzag(_unplaned(body, block.word))
    cut = block.count * block.gap
    positions = np.cumsum(_unplaned(body[:cut], block.gap).astype(np.int64) + 1) - 1
    return positions, _unzigzag(_unplaned(body[cut:], block.word))


def _add(words: Words, block: Block, stored: Bytes) -> None:
    positions, values = _unpack(block, stored)
    if positions is None:
        words += values
    else:
        words[positions] += values


# ---- files


def _write(path: Path, header: Header, stored: Mapping[str, Bytes]) -> int:
    """Write a packet; it appears under its name only when it is complete.  Returns its size in bytes."""
    text = json.dumps({"format": FORMAT, **asdict(header)}, separators=(",", ":"))
    part = path.with_name(path.name + ".part")
    try:
        save_file(dict(stored), part, {"header": text, "crc": f"{crc32(text.encode()):08x}"})
        size = part.stat().st_size
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        raise InferenceError(f"cannot write {path}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return size


class Packet:
    """An open packet file.

    Raises:
        InferenceError: it is missing, torn, or not a packet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safe_open(str(path), framework="np")
            meta = self._file.metadata() or {}  # type: ignore[no-untyped-call]
            text = meta.get("header", "")
            if f"{crc32(text.encode()):08x}" != meta.get("crc"):
                raise InferenceError(f"{path}: not a packet of weights, or its header is damaged")
            fields = json.loads(text)
        except (OSError, SafetensorError) as error:
            raise InferenceError(f"{path}: cannot read this packet ({error})") from error
        if fields.pop("format", None) != FORMAT:
            raise InferenceError(f"{path}: not of the format {FORMAT}; both sides need the same release of Slipstream")
        blocks = tuple(Block(**{**b, "shape": tuple(b["shape"])}) for b in fields.pop("blocks"))
        self.header = Header(**fields, blocks=blocks)

    def stored(self) -> dict[str, Bytes]:
        """Every block's bytes, each checked against its CRC."""
        found: dict[str, Bytes] = {}
        for block in self.header.blocks:
            if block.mode == "same":
                continue
            try:
                found[block.name] = self._file.get_tensor(block.name)  # type: ignore[no-untyped-call]
            except (OSError, SafetensorError) as error:
                raise InferenceError(f"{self.path}: {block.name} is missing ({error})") from error

        def check(name_crc: tuple[str, int]) -> None:
            if crc32(found[name_crc[0]].data) != name_crc[1]:
                raise InferenceError(f"{self.path}: the bytes of {name_crc[0]} are damaged")

        _each(check, [(b.name, b.crc) for b in self.header.blocks if b.name in found])
        return found


def write_anchor(path: Path, tensors: Mapping[str, Raw], version: str, sums: Mapping[str, str] | None = None) -> int:
    """Whole tensors as a packet; returns bytes written.  ``sums``: their checksums, where they are known."""
    sums = checksums(tensors) if sums is None else sums

    def block(item: tuple[str, Raw]) -> Block:
        name, raw = item
        crc = crc32(raw.data.data)
        return Block(name, raw.dtype, raw.shape, "whole", sums[name], raw.data.size, crc=crc)

    header = Header(version, digest(sums), None, None, tuple(_each(block, tensors.items())))
    return _write(path, header, {name: raw.data for name, raw in tensors.items()})


def write_delta(
    path: Path,
    old: Mapping[str, Raw],
    new: Mapping[str, Raw],
    base: str,
    version: str,
    old_sums: Mapping[str, str] | None = None,
    new_sums: Mapping[str, str] | None = None,
) -> int:
    """The difference ``new - old`` as a packet; returns bytes written.

    Raises:
        InferenceError: names, dtypes or shapes differ (send an anchor), or the file cannot be written.
    """
    form = {name: (raw.dtype, raw.shape) for name, raw in new.items()}
    if form != {name: (raw.dtype, raw.shape) for name, raw in old.items()}:
        raise InferenceError(f"{version} has other names, dtypes or shapes than {base}; it needs an anchor")
    old_sums = checksums(old) if old_sums is None else old_sums
    sums = checksums(new) if new_sums is None else new_sums

    def pack(name: str) -> tuple[Block, Bytes | None]:
        return _pack(name, new[name], _words(new[name]) - _words(old[name]), sums[name])

    packed = _each(pack, new)
    header = Header(version, digest(sums), base, digest(old_sums), tuple(block for block, _ in packed))
    return _write(path, header, {block.name: data for block, data in packed if data is not None})


def join(path: Path, parts: Sequence[Path]) -> int:
    """Consecutive deltas as one that leads from the first's base to the last's version; returns bytes written.

    Raises:
        InferenceError: a part is damaged, is an anchor, or does not follow the one before.
    """
    packets = [Packet(part) for part in parts]
    for before, after in itertools.pairwise(packets):
        if (before.header.version, before.header.digest) != (after.header.base, after.header.base_digest):
            raise InferenceError(f"{after.path} follows {after.header.base}, not {before.header.version}")
    if any(packet.header.base is None for packet in packets):
        raise InferenceError("an anchor cannot be joined with deltas: it needs no base")
    stored = [packet.stored() for packet in packets]
    blocks = [{block.name: block for block in packet.header.blocks} for packet in packets]
    last = packets[-1].header

    def merge(block: Block) -> tuple[Block, Bytes | None]:
        total = np.zeros(int(np.prod(block.shape, dtype=np.int64)), _WORDS[block.word])
        for by_name, data in zip(blocks, stored, strict=True):
            if block.name in data:
                _add(total, by_name[block.name], data[block.name])
        like = Raw(block.dtype, block.shape, total.view(np.uint8))
        return _pack(block.name, like, total, block.checksum)

    packed = _each(merge, last.blocks)
    first = packets[0].header
    header = Header(last.version, last.digest, first.base, first.base_digest, tuple(block for block, _ in packed))
    return _write(path, header, {block.name: data for block, data in packed if data is not None})


# ---- the receiving side


class Mirror:
    """A host copy of the weights at one known version, brought forward by packets."""

    def __init__(self) -> None:
        self.version: str | None = None
        """None: nothing yet, or lost."""
        self.tensors: dict[str, Raw] = {}
        self._digest: str | None = None

    def clear(self) -> None:
        """Forget everything; the next packet must be an anchor."""
        self.version, self._digest, self.tensors = None, None, {}

    def holds(self, header: Header) -> bool:
        """True when the mirror already is what the packet leads to."""
        return (self.version, self._digest) == (header.version, header.digest)

    def follows(self, header: Header) -> bool:
        """True when the packet can be applied now."""
        return header.base is None or (self.version, self._digest) == (header.base, header.base_digest)

    def apply(self, path: Path) -> bool:
        """Apply one packet; False when it was applied before.  Nothing has changed when the packet itself is at fault.

        Raises:
            InferenceError: the packet is damaged or follows another version.
        """
        packet = Packet(path)
        header = packet.header
        if self.holds(header):
            return False
        if not self.follows(header):
            raise InferenceError(f"{path}: follows {header.base}, this receiver holds {self.version}; send an anchor")
        stored = packet.stored()
        if header.base is None:
            fresh = {b.name: Raw(b.dtype, b.shape, stored[b.name].reshape(-1)) for b in header.blocks}
            self._settle(header, fresh)
            return True
        self.version = None  # from here on the tensors are neither the old nor the new ones

        def add(block: Block) -> None:
            if block.name in stored:
                _add(_words(self.tensors[block.name]), block, stored[block.name])

        try:
            _each(add, header.blocks)
        except BaseException:
            self.clear()
            raise
        self._settle(header, self.tensors)
        return True

    def _settle(self, header: Header, tensors: dict[str, Raw]) -> None:
        want = {block.name: block.checksum for block in header.blocks}
        if checksums(tensors) != want:
            self.clear()
            raise InferenceError(
                f"{header.version}: the reconstructed weights are not those that were sent; send an anchor"
            )
        self.version, self._digest, self.tensors = header.version, header.digest, tensors


def _header(path: Path) -> Header | None:
    """None for a packet that cannot be read: it only matters if it is needed, and then ``apply`` says why."""
    try:
        return Packet(path).header
    except InferenceError:
        return None


def catch_up(mirror: Mirror, packets: Sequence[Path]) -> list[Path]:
    """Bring a mirror to the last packet's version; returns the packets that had to be applied.

    It starts after the newest packet whose result it holds, else at the newest anchor.

    Raises:
        InferenceError: a packet that is needed is missing, damaged or out of order.
    """
    headers = [_header(path) for path in packets]
    known = [i for i, header in enumerate(headers) if header is not None and mirror.holds(header)]
    next_up = [i for i, h in enumerate(headers) if h is not None and h.base is not None and mirror.follows(h)]
    anchors = [i for i, header in enumerate(headers) if header is not None and header.base is None]
    starts = [i + 1 for i in known] or next_up or anchors
    if not starts:
        raise InferenceError(
            f"no way from {mirror.version} to the version that was sent: {[str(p) for p in packets]} hold no anchor"
        )
    applied = []
    for path in packets[max(starts) :]:
        if mirror.apply(path):
            applied.append(path)
    return applied
