"""`trajectories.html`: a page to filter, sort and read all trajectories of a run, also from `file://`.

A page on `file://` may load scripts, but no other files. The index and each chunk of texts are therefore scripts in
`report_files/`, each a call with gzipped JSON. They take about a fifth of the size of the run's own files.
`skyrl watch` serves the same addresses without writing them.
"""

import base64
import gzip
import json
from pathlib import Path

from skyrl_report.index import IndexedFile, TrajectoryIndex, describe_chunk
from skyrl_report.metrics_file import read_metrics
from skyrl_report.run_folder import RunFolder
from skyrl_report.templating import render

MAX_BYTES = 64 * 2**20
"""Maximum size of all chunks that are written. The page names the command that shows all texts."""

FOLDER = "report_files"
INDEX = "index.js"


def write_browser(folder: RunFolder) -> Path | None:
    """Write `trajectories.html` with its index and texts. Return its path, or None without trajectories.

    Files that an earlier call indexed or wrote are not read again. If the texts exceed `MAX_BYTES`, the last and the
    first evaluation come first, then later steps before earlier ones, and evaluations before training.
    """
    files = folder.path / FOLDER
    index = read_index(folder)
    index.update(folder, last_step=last_step(folder))
    if not len(index):
        return None
    files.mkdir(exist_ok=True)
    written, n_bytes, kept = [], 0, {INDEX}
    for file in _by_priority(index):
        names = [chunk_name(file, i) for i in range(len(file.chunks))]
        for i, name in enumerate(names):
            if not (files / name).exists():
                _replace(files / name, encode_chunk(folder, file, i))
        n_bytes += sum((files / name).stat().st_size for name in names)
        if n_bytes > MAX_BYTES:
            break
        kept.update(names)
        written.append(file.name)
    for path in files.iterdir():
        if path.name not in kept:
            path.unlink()
    _replace(files / INDEX, encode_index(index, written, is_complete=True))
    _replace(folder.browser, render_browser(folder).encode())
    return folder.browser


def render_browser(folder: RunFolder, *, is_live: bool = False) -> str:
    """Return the text of `trajectories.html`."""
    path = folder.path.resolve()
    return render("trajectories.html.j2", project=path.parent.name, run=path.name, is_live=is_live)


def read_index(folder: RunFolder) -> TrajectoryIndex:
    """Return the index that was written with the page, or an empty one."""
    try:
        script = (folder.path / FOLDER / INDEX).read_text(encoding="ascii")
    except FileNotFoundError:
        return TrajectoryIndex()
    return TrajectoryIndex.from_json(gzip.decompress(base64.b64decode(script.split('"')[-2])).decode())


def last_step(folder: RunFolder) -> int | None:
    """Return the last logged step. Trajectories of later steps are left over from before a rewind."""
    rows = read_metrics(folder.metrics)
    return rows[-1]["step"] if rows else None


def encode_index(index: TrajectoryIndex, written: list[str] | None, *, is_complete: bool) -> bytes:
    """Return the script of an index. `written` lists the files whose texts can be loaded, None stands for all."""
    options = json.dumps({"written": written, "complete": is_complete})
    return _script(f"index({options}", index.to_json())


def encode_chunk(folder: RunFolder, file: IndexedFile, chunk: int) -> bytes:
    """Return the script of a chunk."""
    texts = describe_chunk(folder, file, chunk)
    return _script(f"chunk({json.dumps(chunk_name(file, chunk))}", json.dumps(texts, ensure_ascii=False, default=str))


def chunk_name(file: IndexedFile, chunk: int) -> str:
    """Return the name of a chunk's script in `report_files/`."""
    return f"{file.name}-{chunk}.js"


def _script(call: str, content: str) -> bytes:
    packed = base64.b64encode(gzip.compress(content.encode("utf-8", errors="replace"), 5, mtime=0)).decode()
    return f'trajectories.{call}, "{packed}")\n'.encode()


def _by_priority(index: TrajectoryIndex) -> list[IndexedFile]:
    steps = [file.step or 0 for file in index.files if file.phase == "eval"]
    ends = {min(steps, default=0), max(steps, default=0)}
    return sorted(index.files, key=lambda f: (f.phase == "train", f.step not in ends, -(f.step or 0)))


def _replace(path: Path, content: bytes) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)
