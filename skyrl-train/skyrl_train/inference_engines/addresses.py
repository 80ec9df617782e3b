"""Addresses of servers, and this machine's address as seen by them."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit


def server_url(address: str) -> str:
    """Convert "host:port" to a URL. A URL is unchanged, except for trailing slashes."""
    url = address if "://" in address else f"http://{address}"
    return url.rstrip("/")


def find_host(url: str) -> str:
    """Return this machine's address on the network of a server."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))  # sends nothing
        host: str = probe.getsockname()[0]
        return host
