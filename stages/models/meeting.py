"""Where the ranks of a gang find one another: a small key-value server in rank 0's process, at an address that the
others are given. No file and no lock of a shared filesystem is needed for it.

    rank 0 listens ──► tcp://HOST:PORT, which the others are given ──► every rank: `store_of` ──► notes (roll_call.py),
       └── its own `store_of` answers there                                                       process groups

It listens on one address of rank 0's host, by which the other ranks reach it, and asks nobody for a certificate: like
the sockets of gloo and NCCL it trusts the network it is on. May import torch.distributed and stages.models.protocol.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from stages.models.protocol import ALONE, Rank


def store_of(rank: Rank) -> Any:
    """The store of the rank's gang, which process groups may be made from; waits until rank 0's is there."""
    if rank.rendezvous == ALONE:
        assert rank.size == 1, f"{rank.size} ranks cannot meet: {rank.rendezvous}"
        return dist.HashStore()
    address = urlsplit(rank.rendezvous)
    if address.scheme != "tcp":
        store, _, _ = next(dist.rendezvous(rank.rendezvous, rank.index, rank.size))
        return store
    host, port = str(address.hostname), int(address.port or 0)
    if rank.listening is None:
        return dist.TCPStore(host, port, None, False)
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=rank.listening)
