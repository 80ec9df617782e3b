"""`checksums.json`: size and checksum of each file of a checkpoint.

The checksum is XXH3, because it is faster than any disk. It detects accidents, not forgery.
"""

import hashlib
import json
from pathlib import Path

from xxhash import xxh3_128, xxh3_128_hexdigest

from skyrl_report.remote import Fingerprint

MANIFEST = "checksums.json"


def fingerprint(path: Path) -> Fingerprint:
    """Read a file and return its size and checksum."""
    with path.open("rb") as file:
        checksum = hashlib.file_digest(file, xxh3_128).hexdigest()
        return Fingerprint(file.tell(), checksum)


def write_manifest(folder: Path) -> None:
    """Write the fingerprints of all files under a folder into its `checksums.json`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): fingerprint(path)._asdict() for path in paths}
    manifest = {"files": files, "xxh3_128": _checksum_of(files)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def find_damage(folder: Path) -> list[str]:
    """Return a phrase for each file of `checksums.json` that is missing or changed. Other files are ignored."""
    try:
        files = parse_manifest((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return [f"{MANIFEST} is missing, because the copy is incomplete or an older version wrote it"]
    except OSError as error:
        return [f"cannot read {MANIFEST} ({error.strerror})"]
    if files is None:
        return [f"{MANIFEST} is damaged"]
    return [fault for name, saved in files.items() if (fault := _find_fault(folder / name, saved))]


def parse_manifest(content: bytes) -> dict[str, Fingerprint] | None:
    """Return the fingerprints in a `checksums.json` by relative path, or None if the file is damaged."""
    try:
        manifest = json.loads(content)
        files = {name: Fingerprint(**entry) for name, entry in manifest["files"].items()}
        is_inside = all(not Path(name).is_absolute() and ".." not in Path(name).parts for name in files)
        return files if is_inside and manifest["xxh3_128"] == _checksum_of(manifest["files"]) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _find_fault(path: Path, saved: Fingerprint) -> str | None:
    try:
        found = fingerprint(path)
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"cannot read {path} ({error.strerror})"
    if found.n_bytes != saved.n_bytes:
        return f"{path} has {found.n_bytes:,} bytes instead of {saved.n_bytes:,}"
    if found != saved:
        return f"the content of {path} has changed since it was saved"
    return None


def _checksum_of(files: dict[str, dict[str, object]]) -> str:
    return xxh3_128_hexdigest(json.dumps(files, sort_keys=True).encode())
