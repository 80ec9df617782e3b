"""Process many records concurrently. Each result is appended when it is done. A rerun processes the rest."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from fcntl import LOCK_EX, LOCK_NB, flock
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from skyrl_gym.runtime.text import describe_error

Record = dict[str, Any]


class ToolError(Exception):
    """A mistake in the command or its files, with the fix in the message."""


@dataclass(slots=True)
class JobSummary:
    """Number of records that this run wrote, that existed before, and that failed."""

    n_written: int = 0
    n_skipped: int = 0
    n_failed: int = 0
    first_error: str = ""


def run_tool(tool: Callable[[], int]) -> int:
    """Run a command and return its exit status. A user's mistake is printed as one line."""
    try:
        return tool()
    except (ToolError, ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; rerun the command to resume.", file=sys.stderr)
        return 130


def read_records(path: Path) -> list[Record]:
    """Return the records of a JSON Lines file.

    Raises:
        ToolError: the file does not exist, or a line is not a JSON object.
    """
    if not path.is_file():
        raise ToolError(f"the file {path} does not exist; generate it with data_processing.generate_dataset")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if line.strip():
            records.append(_parse(line, path, number))
    return records


def work(
    records: Iterable[Record],
    function: Callable[[Record], Record],
    output: Path,
    *,
    n_total: int,
    concurrency: int = 4,
    max_error_share: float = 0.1,
    title: str = "",
) -> JobSummary:
    """Append `function(record)` to `output` for each record whose `key` is not there yet. `key` is a field of both.

    A failed record is counted, and the next run retries it. Only one process at a time may write `output`.

    Raises:
        ToolError: more than `max_error_share` of the records have failed, or a second process is writing the file.
    """
    summary = JobSummary()
    with _lock_and_read(output) as written, output.open("a", encoding="utf-8") as file:
        done = {record.get("key") for record in written}

        def pending() -> Iterator[Record]:
            for record in records:
                if record["key"] in done:
                    summary.n_skipped += 1
                    bar.update()
                else:
                    done.add(record["key"])
                    yield record

        with (
            tqdm(total=n_total, desc=title, unit="record", disable=None) as bar,
            ThreadPoolExecutor(concurrency) as pool,
        ):
            source, running = pending(), set[Future[Record]]()
            try:
                while True:
                    running |= {pool.submit(function, r) for r in islice(source, 2 * concurrency - len(running))}
                    if not running:
                        break
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        bar.update()
                        _write(future, file, summary)
                    file.flush()
                    if summary.n_failed > max(1, max_error_share * n_total):
                        raise ToolError(
                            f"{summary.n_failed} of {n_total} records failed, more than {max_error_share:.0%}; the "
                            f"first: {summary.first_error}. Those that succeeded are in {output}; rerun to resume"
                        )
            finally:
                for future in running:
                    future.cancel()
    return summary


def _write(future: Future[Record], file: Any, summary: JobSummary) -> None:
    try:
        record = future.result()
    except Exception as error:  # noqa: BLE001, the boundary of one record
        summary.n_failed += 1
        summary.first_error = summary.first_error or describe_error(error)
        return
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    summary.n_written += 1


@contextmanager
def _lock_and_read(output: Path) -> Iterator[list[Record]]:
    """Lock an output file and yield its records. An incomplete last line, cut off by a kill, is removed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a+b") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise ToolError(f"another process writes {output}; wait until it ends, or set another --output") from None
        file.seek(0)
        content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            file.truncate(len(complete))
        lines = complete.decode().split("\n")
        yield [_parse(line, output, n) for n, line in enumerate(lines, start=1) if line.strip()]


def _parse(line: str, path: Path, number: int) -> Record:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ToolError(f"line {number} of {path} is not JSON ({error}); remove it") from None
    if not isinstance(record, dict):
        raise ToolError(f"line {number} of {path} is {line[:80]!r}; a record is a JSON object")
    return record
