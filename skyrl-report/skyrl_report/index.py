"""An index of all trajectories of a run: what they are, how they ended, and where they are in the files.

It holds columns instead of rows, so that 100,000 trajectories are a few megabytes that a browser filters in
milliseconds. Texts stay in the run's files. `describe_chunk` reads some 50 of them at a time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from skyrl_report.episodes import EvaluatedEpisode, classify, parse_episode, split_messages, split_reply
from skyrl_report.errors import DataError
from skyrl_report.run_folder import AGGREGATED, EVAL_ONLY, RunFolder, parse_steps

VERSION = 1
CHUNK_BYTES = 200_000
CHUNK_ROWS = 50
PREVIEW_CHARACTERS = 90
TOKEN_KEYS = ("tokens", "logprobs", "advantages", "loss_mask")
"""Keys of a segment with a value for each token of the response, if the run recorded them."""

TABLES = ("env", "source", "stop", "category", "prompt")
"""Columns whose values are numbers of entries in a table, because they repeat."""


@dataclass(frozen=True)
class IndexedFile:
    """A file of trajectories. Its rows are `first` … `first + n_rows - 1` of the index, in chunks of (offset, rows)."""

    path: str  # "evals/global_step_5/catch.jsonl", relative to the run folder
    name: str  # of its chunks in `report_files/`. It changes with the content
    n_bytes: int
    phase: str  # "eval" or "train"
    step: int | None
    first: int
    n_rows: int
    chunks: tuple[tuple[int, int], ...]


@dataclass
class TrajectoryIndex:
    """The trajectories of a run. `update` adds new files."""

    files: list[IndexedFile] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in TABLES})
    previews: list[str] = field(default_factory=list)
    """The end of each prompt, by number of the prompt."""
    columns: dict[str, list[Any]] = field(
        default_factory=lambda: {name: [] for name in ("uid", "reward", "success", "turns", "tokens", *TABLES)}
    )
    _numbers: dict[str, dict[str, int]] = field(default_factory=dict, compare=False)

    def __len__(self) -> int:
        return len(self.columns["uid"])

    def update(self, folder: RunFolder, last_step: int | None = None, limit_s: float = float("inf")) -> bool:
        """Index new files, and start again if an indexed file has changed. Return True once all files are indexed.

        Args:
            last_step: leave out later steps. They are left over from before a rewind.
            limit_s: stop after the file that exceeds this time.

        Raises:
            DataError: a line is not a JSON object.
        """
        started = time.monotonic()
        found = {path.relative_to(folder.path).as_posix(): path for path in _find_files(folder, last_step)}
        sizes = {name: path.stat().st_size for name, path in found.items()}
        if any(sizes.get(file.path) != file.n_bytes for file in self.files):
            self.__init__()  # type: ignore[misc]
        known = {file.path for file in self.files}
        for name, path in found.items():
            if name not in known:
                if time.monotonic() - started > limit_s:
                    return False
                self._add(name, path)
        return True

    def _add(self, name: str, path: Path) -> None:
        first = len(self)
        chunks: list[tuple[int, int]] = []
        start = n_rows = 0
        for offset, row in _read_rows(path):
            if n_rows == CHUNK_ROWS or (n_rows and offset - start > CHUNK_BYTES):
                chunks.append((start, n_rows))
                start, n_rows = offset, 0
            n_rows += 1
            self._append(parse_episode(row), row)
        end = path.stat().st_size
        if n_rows:
            chunks.append((start, n_rows))
        is_evaluation = name.startswith("evals/")
        steps = parse_steps([path.parent.name if is_evaluation else path.stem])
        self.files.append(
            IndexedFile(
                path=name,
                name=blake2b(f"{name} {end} {path.stat().st_mtime_ns}".encode(), digest_size=6).hexdigest(),
                n_bytes=end,
                phase="eval" if is_evaluation else "train",
                step=steps[0] if steps else None,
                first=first,
                n_rows=len(self) - first,
                chunks=tuple(chunks),
            )
        )

    def _append(self, episode: EvaluatedEpisode, row: dict[str, Any]) -> None:
        trajectory, columns = episode.trajectory, self.columns
        categories = classify(episode)
        prompt = f"{trajectory.data_source}/{episode.prompt_key}"
        columns["uid"].append(str(row.get("uid") or ""))
        columns["reward"].append(None if trajectory.score is None else round(trajectory.score, 4))
        columns["success"].append(int(episode.is_success and episode.is_valid))
        columns["turns"].append(episode.n_turns)
        columns["tokens"].append(episode.n_tokens)
        for name, value in {
            "env": trajectory.env_class,
            "source": trajectory.data_source,
            "stop": trajectory.stop_reason,
            "category": next(iter(categories), ""),
            "prompt": prompt,
        }.items():
            columns[name].append(self._number(name, value))
        if len(self.previews) < len(self.tables["prompt"]):
            asked = [
                message.text for message in split_messages(trajectory.prompt, "user") if message.role != "assistant"
            ]
            self.previews.append(" ".join(asked[-1].split())[-PREVIEW_CHARACTERS:] if asked else "")

    def _number(self, table: str, value: str) -> int:
        if (numbers := self._numbers.get(table)) is None:
            numbers = self._numbers[table] = {text: i for i, text in enumerate(self.tables[table])}
        if value not in numbers:
            numbers[value] = len(numbers)
            self.tables[table].append(value)
        return numbers[value]

    def to_json(self) -> str:
        """Return the index as JSON."""
        content = {"version": VERSION, "files": [asdict(file) for file in self.files], "tables": self.tables}
        content |= {"previews": self.previews, "columns": self.columns}
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> TrajectoryIndex:
        """Return the index that `to_json` wrote, or an empty one if another version did."""
        content = json.loads(text)
        if content.get("version") != VERSION:
            return cls()
        files = [IndexedFile(**file | {"chunks": tuple(map(tuple, file["chunks"]))}) for file in content["files"]]
        return cls(files, content["tables"], content["previews"], content["columns"])


def describe_chunk(folder: RunFolder, file: IndexedFile, chunk: int) -> list[dict[str, Any]]:
    """Read the trajectories of a chunk, for display."""
    start = file.chunks[chunk][0]
    end = file.chunks[chunk + 1][0] if chunk + 1 < len(file.chunks) else file.n_bytes
    with (folder.path / file.path).open("rb") as content:
        content.seek(start)
        lines = content.read(end - start).decode("utf-8", errors="replace").split("\n")
    return [describe_row(json.loads(line)) for line in lines if line.strip()]


def describe_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return all that the page of a trajectory shows."""
    episode = parse_episode(row)
    segments = [*(row.get("earlier") or ()), row]
    tokens = [{key: segment[key] for key in TOKEN_KEYS if segment.get(key)} for segment in segments]
    reply = {"rewards": [segment["score"] for segment in segments if isinstance(segment.get("score"), list)]}
    return reply | {
        "prompt": [message._asdict() for message in split_messages(episode.trajectory.prompt, "user")],
        "messages": [
            {"role": role, **(split_reply(text)._asdict() if role == "assistant" else {"text": text})}
            for role, text in episode.messages
        ],
        "failures": classify(episode),
        "ending": episode.ending,
        "error": episode.trajectory.error,
        "extras": episode.trajectory.extras,
        "images": sorted({name for segment in segments for name in segment.get("images") or ()}),
        "metrics": episode.env_metrics,
        "components": row.get("reward_components") or {},
        "turns": [{"reward": turn.get("reward"), "stop": turn.get("stop_reason")} for turn in episode.turns],
        "timing": row.get("timing") or {},
        "versions": row.get("weight_versions") or [],
        "tokens": tokens if any(tokens) else [],
    }


def _find_files(folder: RunFolder, last_step: int | None) -> Iterator[Path]:
    """Yield the files of trajectories: evaluations before training, by ascending step."""
    steps = [step for step in folder.eval_steps() if last_step is None or step <= last_step]
    folders = [folder.path / "evals" / EVAL_ONLY, *map(folder.evals, steps)]
    for evaluation in folders:
        yield from sorted(path for path in evaluation.glob("*.jsonl") if path.name != AGGREGATED)
    for step in folder.trajectory_steps():
        if last_step is None or step <= last_step:
            yield folder.trajectories(step)


def _read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (offset in bytes, row). A file appears once it is complete, so every line must be an object."""
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict):
                    raise DataError(f"{path}:{number} is not a JSON object; remove the line to report on the rest")
                yield offset, row
            offset += len(line)
