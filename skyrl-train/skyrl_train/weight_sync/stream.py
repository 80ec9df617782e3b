"""A stream of bytes from the sender of a weight sync to all receivers, in pieces of bounded size.

Each piece is written into one of a few slots. Receivers on the sender's machine read the slot itself; gloo copies it to
the others. A slot is written again when every receiver has read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.errors import SyncError
from skyrl_train.weight_sync.base import SyncPlan
from skyrl_train.weight_sync.rendezvous import Guest, Host, gloo_errors, open_store
from skyrl_train.weight_sync.shared_memory import SharedMemory, can_share_memory, open_memory

N_SLOTS = 4
ALIGNMENT = 64  # bytes; every record starts at a multiple of it


def padded(n_bytes: int) -> int:
    """Return the size of a record with its padding."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def slot_bytes(plan: SyncPlan) -> int:
    """Return the size of a slot: `chunk_bytes`, or less if all tensors fit into less."""
    total = sum(padded(spec.n_bytes) for spec in plan.specs)
    return max(ALIGNMENT, min(padded(plan.chunk_bytes), total))


class StreamWriter:
    """The sender's end."""

    def __init__(self, plan: SyncPlan) -> None:
        """Wait until every receiver has connected.

        Raises:
            SyncError: a receiver is missing, or cannot be reached through `plan.transport`.
        """
        self._plan = plan
        self._size = slot_bytes(plan)
        self._remote: list[int] = []  # receivers that gloo reaches
        self._group: dist.ProcessGroupGloo | None = None
        self._sending: list[Any] = [None] * N_SLOTS  # broadcasts in progress
        self._n_pieces, self._n_read, self._used = 0, 0, 0  # published and read pieces; bytes in the current one
        self.n_sent = 0
        self._host = Host(plan)
        try:
            self._connect()
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def _connect(self) -> None:
        shares = self._plan.transport != "broadcast" and can_share_memory()
        memory = SharedMemory.create(N_SLOTS * self._size) if shares else None
        self._buffer = memory.buffer if memory else torch.empty(N_SLOTS * self._size, dtype=torch.uint8)
        try:
            self._host.gather("connect")
            self._host.tell(memory.address if memory else "")
            opened = self._host.gather("connect")
        finally:
            if memory is not None:
                memory.close()  # the mapping remains
        self._remote = [rank for rank, has_opened in opened.items() if not has_opened]
        if self._remote and self._plan.transport == "shared_memory":
            names = ", ".join(self._plan.name(rank) for rank in self._remote)
            raise SyncError(
                f"weight sync {self._plan.version}: {names} cannot open the memory of {self._plan.name(0)}, because it "
                "runs on another machine, in another container, or not on Linux; set "
                "generator.weight_sync_backend=auto"
            )
        if self._remote:
            with gloo_errors(self._plan, self._remote):
                store = open_store(self._plan)
                self._host.tell([store.port, *self._remote])
                self._group = process_group(self._plan, store, self._remote)
        else:
            self._host.tell([])

    def write(self, record: torch.Tensor) -> None:
        """Append bytes (n,), which may be on any device, and padding."""
        start = 0
        while start < len(record):
            slot = self._slot()
            n_bytes = min(len(record) - start, self._size - self._used)
            slot[self._used : self._used + n_bytes].copy_(record[start : start + n_bytes])
            start, self._used = start + n_bytes, self._used + n_bytes
            if self._used == self._size:
                self._publish()
        self._used = padded(self._used)
        if self._used == self._size:
            self._publish()

    def finish(self) -> None:
        """Publish the rest, and wait until every receiver has read everything."""
        if self._used:
            self._publish()
        while self._n_read < self._n_pieces:
            self._wait_until_read()

    def fail(self, error: BaseException) -> None:
        """Tell the receivers that the sync has failed."""
        self._host.fail(error)

    def close(self) -> None:
        """Close the connections."""
        self._host.close()

    def _slot(self) -> torch.Tensor:
        """Return the slot of the current piece, once it is free."""
        if self._n_pieces - self._n_read == N_SLOTS:
            self._wait_until_read()
        start = self._n_pieces % N_SLOTS * self._size
        return self._buffer[start : start + self._size]

    def _publish(self) -> None:
        slot = self._slot()[: self._used]
        self._host.tell(self._used)
        if self._group is not None:
            with gloo_errors(self._plan, self._remote):
                self._sending[self._n_pieces % N_SLOTS] = self._group.broadcast([slot], dist.BroadcastOptions())  # type: ignore[attr-defined]
        self.n_sent += self._used
        self._n_pieces, self._used = self._n_pieces + 1, 0

    def _wait_until_read(self) -> None:
        """Wait until every receiver has read the oldest piece."""
        self._host.gather("read the weights")
        index = self._n_read % N_SLOTS
        self._n_read += 1
        if self._sending[index] is not None:
            with gloo_errors(self._plan, self._remote):
                self._sending[index].wait()


class StreamReader:
    """A receiver's end."""

    def __init__(self, plan: SyncPlan) -> None:
        """Connect to the sender.

        Raises:
            SyncError: the sender is missing.
        """
        self._plan = plan
        self._group: dist.ProcessGroupGloo | None = None
        self._size = slot_bytes(plan)
        self._n_pieces = 0  # begun
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes of the current piece
        self.n_received = 0
        self._guest = Guest(plan)
        try:
            self._connect()
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def _connect(self) -> None:
        self._guest.tell("here")
        address = self._guest.receive("connect")
        memory = open_memory(address) if address else None
        self._guest.tell(memory is not None)
        remote = self._guest.receive("connect")
        if memory is not None:
            self._buffer = memory.buffer
            memory.close()  # the mapping remains
            return
        port, *remote = remote
        with gloo_errors(self._plan, [0]):
            self._group = process_group(self._plan, open_store(self._plan, port), remote)
        self._buffer = torch.empty(self._size, dtype=torch.uint8)

    def read(self, n_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the next record, in parts (n,) that are valid until the next one."""
        while n_bytes:
            if self._used == len(self._piece):
                self._next_piece()
            n_part = min(n_bytes, len(self._piece) - self._used)
            yield self._piece[self._used : self._used + n_part]
            self._used, n_bytes = self._used + n_part, n_bytes - n_part
        self._used = padded(self._used)

    @property
    def n_left(self) -> int:
        """Bytes of the current piece that were not read."""
        if self._used == len(self._piece):
            self._next_piece()
        return len(self._piece) - self._used

    def finish(self) -> None:
        """Tell the sender that everything was read."""
        self._free_piece()
        self.close()

    def fail(self, error: BaseException) -> None:
        """Tell the sender that this receiver has failed."""
        self._guest.fail(error)

    def close(self) -> None:
        """Close the connection."""
        self._guest.close()

    def _next_piece(self) -> None:
        self._free_piece()
        n_bytes: int = self._guest.receive("send the weights")
        start = self._n_pieces % N_SLOTS * self._size if self._group is None else 0
        self._piece, self._used = self._buffer[start : start + n_bytes], 0
        if self._group is not None:
            with gloo_errors(self._plan, [0]):
                self._group.broadcast([self._piece], dist.BroadcastOptions()).wait()  # type: ignore[attr-defined]
        self._n_pieces += 1
        self.n_received += n_bytes

    def _free_piece(self) -> None:
        if self._n_pieces:
            self._guest.tell("read")


def process_group(plan: SyncPlan, store: dist.TCPStore, remote: Sequence[int]) -> dist.ProcessGroupGloo:
    """Connect the sender with remote receivers, of which this may be one."""
    ranks = [0, *remote]
    return dist.ProcessGroupGloo(store, ranks.index(plan.rank), len(ranks), timedelta(seconds=plan.timeout_s))
