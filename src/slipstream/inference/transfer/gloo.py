"""A broadcast group of one sender and the workers of one replica, over torch's Gloo.

Owns: joining a group of its own (torch's default process group is not touched, since an engine may have one), the
chunked broadcast, deadlines.  Refuses: what the bytes mean.

One group per replica: a replica that dies breaks its own group and nobody else's.  A group that has failed is not
used again.
"""

from __future__ import annotations

import datetime
from typing import Any

from slipstream.errors import InferenceError
from slipstream.inference.transfer.raw import Bytes

_PREFIX = "slipstream-weights"


def open_store(host: str, timeout_seconds: float) -> Any:
    """The sender's rendezvous on a free port; its ``.port`` goes to the receivers."""
    import torch.distributed as dist

    timeout = datetime.timedelta(seconds=timeout_seconds)
    return dist.TCPStore(host, 0, None, True, timeout, wait_for_workers=False)


class GlooLink:
    """Membership in one group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    def join(
        cls, host: str, port: int, rank: int, world_size: int, timeout_seconds: float, store: Any = None
    ) -> GlooLink:
        """Wait for all members; ``store`` is the sender's own.

        Raises:
            InferenceError: not everybody came in time.
        """
        import torch.distributed as dist

        timeout = datetime.timedelta(seconds=timeout_seconds)
        try:
            if store is None:
                store = dist.TCPStore(host, port, None, False, timeout)
            options = dist.ProcessGroupGloo._Options()
            # The address that reached the store also reaches the peers; the host's own name may not resolve.
            local = "127.0.0.1" if host in ("127.0.0.1", "localhost") else None
            device = dist.ProcessGroupGloo.create_device(hostname=local) if local else None
            options._devices = [device or dist.ProcessGroupGloo.create_default_device()]
            options._timeout = timeout
            return cls(dist.ProcessGroupGloo(dist.PrefixStore(_PREFIX, store), rank, world_size, options))
        except (RuntimeError, ValueError) as error:
            raise InferenceError(f"cannot join the broadcast group at {host}:{port}: {error}") from error

    def broadcast(self, data: Bytes, chunk_bytes: int) -> None:
        """Rank 0's ``data`` to all others, in place; every member calls it with the same sizes.

        Raises:
            InferenceError: a member died, or did not answer in time.
        """
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        whole = torch.from_numpy(data)
        try:
            for start in range(0, data.size, chunk_bytes):
                self._group.broadcast([whole[start : start + chunk_bytes]], options).wait()
        except RuntimeError as error:
            raise InferenceError(f"the broadcast broke off: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        self._group = None
