"""What a sender tells a receiver: the JSON inside ``init_info`` and ``update_info``.

Owns: one typed message per way of travelling.  Refuses: carrying weights itself; moving bytes (``receiver``).

A shipment names its ``kind``; ``{"path": P}`` alone is a file.

>>> parse_shipment({"path": "/tmp/w.safetensors"}).kind
'file'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from slipstream.errors import RequestError
from slipstream.inference.transfer.raw import Entry

Table = list[tuple[str, str, tuple[int, ...], int]]


class Message(BaseModel):
    """Base: unknown fields are errors, since a field that the receiver ignores would be a wrong load."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class DirectoryInit(Message):
    """Files will come from this directory; the receiver says at once whether it can see it."""

    kind: Literal["directory"] = "directory"
    directory: str


class GlooInit(Message):
    """Join a broadcast group: the sender is rank 0, worker ``w`` of the receiver is rank ``first_rank + w``."""

    kind: Literal["gloo"] = "gloo"
    host: str
    port: int
    world_size: int = Field(ge=2)
    first_rank: int = Field(1, ge=1)
    timeout_seconds: float = Field(gt=0)


class FileShipment(Message):
    """One safetensors file in checkpoint names."""

    kind: Literal["file"] = "file"
    version: str = ""
    path: str


class MemoryShipment(Message):
    """A shared-memory segment of the sender."""

    kind: Literal["memory"] = "memory"
    version: str
    path: str
    size: int
    table: Table


class GlooShipment(Message):
    """The sender broadcasts ``size`` bytes, at most ``chunk_bytes`` at a time, as soon as this has been sent."""

    kind: Literal["gloo"] = "gloo"
    version: str
    size: int
    chunk_bytes: int = Field(ge=1)
    table: Table


class DeltaShipment(Message):
    """Packets in order, from an anchor to ``version``; the receiver skips those that it has applied already."""

    kind: Literal["delta"] = "delta"
    version: str
    packets: list[str] = Field(min_length=1)


class AbandonShipment(Message):
    """Forget an update that an earlier sender left open.  Always answered with an error, which ends the update."""

    kind: Literal["abandon"] = "abandon"


Init = Annotated[DirectoryInit | GlooInit, Field(discriminator="kind")]
Shipment = Annotated[
    FileShipment | MemoryShipment | GlooShipment | DeltaShipment | AbandonShipment, Field(discriminator="kind")
]
_INIT: TypeAdapter[DirectoryInit | GlooInit] = TypeAdapter(Init)
_SHIPMENT: TypeAdapter[FileShipment | MemoryShipment | GlooShipment | DeltaShipment | AbandonShipment] = TypeAdapter(
    Shipment
)


def entries(table: Table) -> list[Entry]:
    """A message's table as entries."""
    return [Entry(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in table]


def _parse(adapter: TypeAdapter[Any], info: Mapping[str, Any], default: str, what: str) -> Any:
    try:
        return adapter.validate_python({"kind": default, **info})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise RequestError(f"{what}: {where}: {first['msg']}") from error


def parse_init(info: Mapping[str, Any]) -> DirectoryInit | GlooInit:
    """Raises ``RequestError`` naming the field at fault."""
    message: DirectoryInit | GlooInit = _parse(_INIT, info, "directory", "init_info")
    return message


def parse_shipment(
    info: Mapping[str, Any],
) -> FileShipment | MemoryShipment | GlooShipment | DeltaShipment | AbandonShipment:
    """Raises ``RequestError`` naming the field at fault."""
    message: FileShipment | MemoryShipment | GlooShipment | DeltaShipment | AbandonShipment = _parse(
        _SHIPMENT, info, "file", "update_info"
    )
    return message
