"""A stream of bytes from the sender of a weight sync to all receivers, in bounded memory.

The sender cuts the stream into pieces of at most `chunk_bytes`, and writes piece p into slot p % 4 of a ring of
`N_SLOTS` = 4 slots. Bytes travel through slots, and short messages through the sockets of `rendezvous`:

    sender                                      each receiver
    write piece 0 into slot 0, send its size    read slot 0, send "read"
    write pieces 1, 2 and 3, send their sizes   read slots 1, 2 and 3, send "read" for each
    wait for every "read" of piece 0
    write piece 4 into slot 0, send its size    …

The invariant is n_pieces - n_read ≤ 4: a slot is written again only when all receivers have read it. So a model of
15 GB passes through 64 MiB, and the sender is at most four pieces ahead of the slowest receiver.

Receivers that can open the slots' memory read it in place. Remote receivers cannot, so a process group broadcasts each
piece into their buffers, with gloo between CPUs and NCCL between GPUs.

A record is the bytes of one tensor. It may span several pieces, and the next record starts at the next multiple of 64
bytes, so a record within one piece can be viewed as values of any dtype.

With `cuda_ipc`, a process can open only memory of its GPU, so each rank of the model writes the same stream into
slots on its GPU. Only rank 0 exchanges messages with receivers, and a barrier before each message makes sure that all
ranks have written the piece.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from skyrl_train.errors import SyncError
from skyrl_train.weight_sync.base import SyncPlan
from skyrl_train.weight_sync.memory import SharedMemory, can_share_memory, open_memory
from skyrl_train.weight_sync.rendezvous import GRACE_S, ReceiverEndpoint, SenderEndpoint, group_errors, open_store

N_SLOTS = 4
ALIGNMENT = 64  # every record starts at a multiple of this many bytes
POLL_S = 2e-4


def pad_size(n_bytes: int) -> int:
    """Return the size of a record with its padding: 100 bytes take 128."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def slot_bytes(plan: SyncPlan) -> int:
    """Return the size of a slot: `chunk_bytes`, or less if all tensors fit into one smaller slot."""
    total = sum(pad_size(spec.n_bytes) for spec in plan.specs)
    return max(ALIGNMENT, min(pad_size(plan.chunk_bytes), total))


def stream_device(plan: SyncPlan) -> torch.device:
    """Return the device of the slots in this process."""
    if plan.transport in ("nccl", "cuda_ipc"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def memory_location(device: torch.device) -> str:
    """Return where a device's memory is: "host", or a GPU's UUID. Processes at the same place can open the memory."""
    return "host" if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


class StreamWriter:
    """The sending end. With `cuda_ipc`, every rank of the model has one, and all ranks make the same calls."""

    def __init__(self, plan: SyncPlan) -> None:
        """Connect to every receiver. Raise SyncError if one is missing or `plan.transport` cannot reach it."""
        self._plan = plan
        self._device = stream_device(plan)
        self._size = slot_bytes(plan)
        self._remote: list[int] = []  # receivers that cannot open the slots
        self._group: Any = None
        self._sending: list[Any] = [None] * N_SLOTS  # broadcast in progress from each slot
        self._n_pieces, self._n_read = 0, 0  # published pieces, pieces that every receiver has read
        self._used = 0  # bytes in the current piece
        self.n_sent = 0
        self._n_ranks = dist.get_world_size() if plan.transport == "cuda_ipc" and dist.is_initialized() else 1
        self._is_first = self._n_ranks == 1 or dist.get_rank() == 0
        self._endpoint: SenderEndpoint | None = None
        self._connect_deadline = time.monotonic() + plan.timeout_s
        try:
            self._connect()
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def _connect(self) -> None:
        """Allocate the slots, and agree with each receiver on how it reads them.

        receiver   "here"
        sender     addresses of the slots, by memory location
        receiver   True if it could open the slots at its location
        sender     [], or the port of a process group and the receivers in it
        receiver   "connected"
        sender     "start"
        """
        size = N_SLOTS * self._size
        memory: SharedMemory | None = None
        can_share = self._device.type == "cuda" or can_share_memory()
        if self._plan.transport in ("shared_memory", "auto", "cuda_ipc") and can_share:
            memory = SharedMemory.create(size, self._device)
        self._buffer = memory.buffer if memory else torch.empty(size, dtype=torch.uint8, device=self._device)
        addresses = {memory_location(self._device): memory.address} if memory else {}
        if self._n_ranks > 1:
            parts: list[dict[str, str]] = [{}] * self._n_ranks
            dist.all_gather_object(parts, addresses)
            addresses = {place: address for part in reversed(parts) for place, address in part.items()}
        try:
            self._on_first_rank(lambda: self._introduce(addresses))
        finally:
            if memory is not None:
                memory.close()  # the mapping remains
        if self._remote:
            with group_errors(self._plan, self._remote):
                store = open_store(self._plan)
                self._send([store.port, *self._remote])
                self._group = process_group(self._plan, store, self._remote, self._device)
        else:
            self._on_first_rank(lambda: self._send([]))
        # Without "start", a fast receiver could be done and close its connections while a slow one is still connecting.
        self._on_first_rank(lambda: self._gather("connect", self._connect_deadline))
        self._on_first_rank(lambda: self._send("start"))

    def _introduce(self, addresses: dict[str, str]) -> None:
        """Accept the receivers, send them the slot addresses, and record receivers that cannot open the slots."""
        self._endpoint = SenderEndpoint(self._plan)
        self._gather("connect", self._connect_deadline)
        self._send(addresses)
        opened = self._gather("connect", self._connect_deadline)
        self._remote = [rank for rank, has_opened in opened.items() if not has_opened]
        names = ", ".join(self._plan.name(rank) for rank in self._remote)
        if self._remote and self._plan.transport == "cuda_ipc":
            raise SyncError(
                f"weight sync {self._plan.version}: {names} is on none of the GPUs of the sending ranks, or "
                "in another container; set generator.weight_sync_backend=gloo"
            )
        if self._remote and self._plan.transport == "shared_memory":
            raise SyncError(
                f"weight sync {self._plan.version}: {names} cannot open the memory of {self._plan.name(0)}, because it "
                "runs on another machine, in another container, or not on Linux; set "
                "generator.weight_sync_backend=auto"
            )

    def write(self, record: torch.Tensor) -> None:
        """Append a record of bytes (n,), on any device, and padding."""
        start = 0
        while start < len(record):
            slot = self._slot()
            n_bytes = min(len(record) - start, self._size - self._used)
            slot[self._used : self._used + n_bytes].copy_(record[start : start + n_bytes])
            start, self._used = start + n_bytes, self._used + n_bytes
            if self._used == self._size:
                self._publish()
        self._used = pad_size(self._used)
        if self._used == self._size:
            self._publish()

    def finish(self) -> None:
        """Publish the last piece, and wait until every receiver has read everything."""
        if self._used:
            self._publish()
        while self._n_read < self._n_pieces:
            self._wait_until_read()

    def fail(self, error: BaseException) -> None:
        """Inform the receivers that the sync has failed."""
        if self._endpoint is not None:
            self._endpoint.fail(error)

    def close(self) -> None:
        """Close the connections."""
        if self._endpoint is not None:
            self._endpoint.close()
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()  # also broadcasts that still wait for an end

    def _slot(self) -> torch.Tensor:
        """Return the slot of the current piece, once it is free."""
        if self._n_pieces - self._n_read == N_SLOTS:
            self._wait_until_read()
        start = self._n_pieces % N_SLOTS * self._size
        return self._buffer[start : start + self._size]

    def _publish(self) -> None:
        slot = self._slot()[: self._used]
        if self._group is None:
            synchronize(self._device)
        self._on_first_rank(lambda: self._send(self._used))
        if self._group is not None:
            with group_errors(self._plan, self._remote):
                self._sending[self._n_pieces % N_SLOTS] = self._group.broadcast([slot], dist.BroadcastOptions())
        self.n_sent += self._used
        self._n_pieces, self._used = self._n_pieces + 1, 0

    def _wait_until_read(self) -> None:
        """Wait until every receiver has read the oldest piece."""
        self._on_first_rank(lambda: self._gather("read the weights"))
        index = self._n_read % N_SLOTS
        self._n_read += 1
        if self._sending[index] is not None:
            with group_errors(self._plan, self._remote):
                self._sending[index].wait()

    def _send(self, message: Any) -> None:
        assert self._endpoint is not None
        self._endpoint.send(message)

    def _gather(self, stage: str, deadline: float | None = None) -> dict[int, Any]:
        assert self._endpoint is not None
        return self._endpoint.gather(stage, deadline)

    def _on_first_rank(self, act: Callable[[], Any]) -> None:
        """Call `act` on rank 0, once all ranks have reached this. If it fails, raise SyncError on every rank."""
        if self._n_ranks == 1:
            act()
            return
        dist.barrier()
        outcome: list[str | None] = [None]
        try:
            if self._is_first:
                act()
        except Exception as error:
            outcome = [str(error)]
            raise
        finally:
            dist.broadcast_object_list(outcome, src=0)
        if outcome[0] is not None:
            raise SyncError(outcome[0])


class StreamReader:
    """A receiver's end."""

    def __init__(self, plan: SyncPlan) -> None:
        """Connect to the sender. SyncError if it is missing."""
        self._plan = plan
        self.device = stream_device(plan)
        self._group: Any = None
        self._size = slot_bytes(plan)
        self._n_pieces = 0  # pieces that this receiver has started to read
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0  # bytes of the current piece that were read
        self.n_received = 0
        self._endpoint = ReceiverEndpoint(plan)
        try:
            self._connect()
        except BaseException as error:
            self.fail(error)
            self.close()
            raise

    def _connect(self) -> None:
        self._endpoint.send("here")
        address = self._endpoint.receive("connect").get(memory_location(self.device))
        memory = None if address is None else open_memory(address, self.device)
        self._endpoint.send(memory is not None)
        remote = self._endpoint.receive("connect")
        if memory is not None:
            self._buffer = memory.buffer
            memory.close()  # the mapping remains
        else:
            port, *remote = remote
            with group_errors(self._plan, [0]):
                self._group = process_group(self._plan, open_store(self._plan, port), remote, self.device)
            self._buffer = torch.empty(self._size, dtype=torch.uint8, device=self.device)
        self._endpoint.send("connected")
        self._endpoint.receive("connect")

    def read(self, n_bytes: int) -> Iterator[torch.Tensor]:
        """Yield the next record in parts (n,), on the device of the stream. Each is valid until the next part."""
        while n_bytes:
            if self._used == len(self._piece):
                self._next_piece()
            n_part = min(n_bytes, len(self._piece) - self._used)
            yield self._piece[self._used : self._used + n_part]
            self._used, n_bytes = self._used + n_part, n_bytes - n_part
        self._used = pad_size(self._used)

    @property
    def n_left(self) -> int:
        """Number of unread bytes in the current piece. Waits for the next piece if all are read."""
        if self._used == len(self._piece):
            self._next_piece()
        return len(self._piece) - self._used

    def finish(self) -> None:
        """Inform the sender that everything was read."""
        self._free_piece()
        self.close()

    def fail(self, error: BaseException) -> None:
        """Inform the sender that this receiver has failed."""
        self._endpoint.fail(error)

    def close(self) -> None:
        """Close the connection."""
        self._endpoint.close()
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()  # also broadcasts that still wait for an end

    def _next_piece(self) -> None:
        self._free_piece()
        n_bytes: int = self._endpoint.receive("send the weights")
        start = self._n_pieces % N_SLOTS * self._size if self._group is None else 0
        self._piece, self._used = self._buffer[start : start + n_bytes], 0
        if self._group is not None:
            with group_errors(self._plan, [0]):
                self._group.broadcast([self._piece], dist.BroadcastOptions()).wait()
            if self.device.type == "cuda":  # poll: a blocking wait would never return if the sender has ended
                received = torch.cuda.Event()
                received.record()
                deadline = time.monotonic() + self._plan.timeout_s
                while not received.query():
                    self._endpoint.check("send the weights")
                    if time.monotonic() > deadline:
                        raise SyncError(describe_stall(self._plan, [0]))
                    time.sleep(POLL_S)
        self._n_pieces += 1
        self.n_received += n_bytes

    def _free_piece(self) -> None:
        if self._n_pieces:
            synchronize(self.device)
            self._endpoint.send("read")


def synchronize(device: torch.device) -> None:
    """Wait until copies from and to the memory of a GPU are complete."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def process_group(plan: SyncPlan, store: dist.TCPStore, remote: Sequence[int], device: torch.device) -> Any:
    """Connect the sender with its remote receivers. Each end calls this, or all get a SyncError after a while."""
    ranks = [0, *remote]
    rank, timeout = ranks.index(plan.rank), timedelta(seconds=plan.timeout_s)
    if device.type == "cpu":
        return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout + timedelta(seconds=4 * GRACE_S)  # NCCL's watchdog ends the process, so ours comes first
    group: Any = dist.ProcessGroupNCCL(store, rank, len(ranks), options)  # torch's stubs lack its methods

    def connect() -> None:
        with torch.cuda.device(device):
            group.broadcast([torch.zeros(1, device=device)], dist.BroadcastOptions()).wait()
            synchronize(device)

    others = [other for other in ranks if other != plan.rank]
    try:
        run_within(plan.timeout_s, connect, describe_stall(plan, others))
    except BaseException:
        group.abort()
        raise
    return group


def run_within(timeout_s: float, function: Callable[[], None], message: str) -> None:
    """Call a function that may hang, in another thread. Raise SyncError(message) if it takes too long."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001, raised by the caller
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    if not wait([outcome], timeout_s).done:
        raise SyncError(message)
    outcome.result()


def describe_stall(plan: SyncPlan, others: Sequence[int]) -> str:
    """Return the error message for a transfer between GPUs that did not complete in time."""
    names = ", ".join(map(plan.name, others))
    return (
        f"weight sync {plan.version}: NCCL reached no connection to {names} within {plan.timeout_s:g} s; see its own "
        "messages with NCCL_DEBUG=INFO, or set generator.weight_sync_backend=gloo"
    )
