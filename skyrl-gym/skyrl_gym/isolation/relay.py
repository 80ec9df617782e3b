"""A relay from a local port to a Unix socket, for programs without a network. Needs only Python's standard library.

As a script, it runs a command with the relay and exits with its status:

    python3 relay.py /run/model.sock 8000 curl http://127.0.0.1:8000/v1/models
"""

import os
import socket
import sys
import threading
from contextlib import suppress

CHUNK_BYTES = 1 << 16


def start_relay(path: str, port: int) -> None:
    """Relay connections to 127.0.0.1:`port` to the Unix socket at `path`, in threads, until this process ends."""
    listening = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=_accept, args=(listening, path), daemon=True).start()


def _accept(listening: socket.socket, path: str) -> None:
    while True:
        client, _ = listening.accept()
        server = socket.socket(socket.AF_UNIX)
        try:
            server.connect(path)
        except OSError:  # the client sees a closed connection
            client.close()
            server.close()
            continue
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until `source` ends, then end both directions: HTTP clients do not close only one."""
    with suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            target.sendall(chunk)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    import subprocess  # slow to import

    start_relay(sys.argv[1], int(sys.argv[2]))
    status = subprocess.call(sys.argv[3:])
    os._exit(128 - status if status < 0 else status)
