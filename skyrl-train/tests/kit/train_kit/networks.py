"""A TCP proxy that cuts, delays or refuses connections."""

import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field


@dataclass
class Faults:
    """Faults of the network between client and server."""

    error_rate: float = 0.0
    """Fraction of connections that are cut in the middle."""
    stall_s: float = 0.0
    """Seconds before each connection is served."""
    stalled_until: float = 0.0
    """Moment of `time.monotonic` before which nothing is forwarded."""
    is_down: bool = False
    """Refuse every connection."""
    generator: random.Random = field(default_factory=lambda: random.Random(0))


class FaultyProxy:
    """A TCP proxy to the server."""

    def __init__(self, server_port: int) -> None:
        self.faults = Faults()
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        faults = self.faults
        if faults.is_down:
            client.close()
            return
        time.sleep(faults.stall_s)
        is_cut = faults.generator.random() < faults.error_rate
        server = socket.create_connection(("127.0.0.1", self._server_port))
        n_bytes = 2000 if is_cut else None
        threads = [
            threading.Thread(target=self._copy, args=(client, server, n_bytes), daemon=True),
            threading.Thread(target=self._copy, args=(server, client, None), daemon=True),
        ]
        for thread in threads:
            thread.start()

    def _copy(self, source: socket.socket, target: socket.socket, n_bytes: int | None) -> None:
        """Copy until the source ends, or `n_bytes`, and end both connections."""
        with suppress(OSError):
            while chunk := source.recv(65536):
                time.sleep(max(0.0, self.faults.stalled_until - time.monotonic()))
                if n_bytes is not None and len(chunk) >= n_bytes:
                    target.sendall(chunk[:n_bytes])
                    break
                n_bytes = None if n_bytes is None else n_bytes - len(chunk)
                target.sendall(chunk)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no further connection."""
        self._listener.close()
