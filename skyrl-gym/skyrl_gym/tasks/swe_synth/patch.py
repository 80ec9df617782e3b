"""Unified diffs of one file, as models write them: line numbers may be wrong, but every context line must match."""

import re
from dataclasses import dataclass

from skyrl_gym.envs.lcb.grading import FENCE, extract_code

MAX_DIFF_LINES = 2_000
_HUNK = re.compile(r"@@ -(\d{1,7})(?:,\d{1,7})? \+\d{1,7}(?:,\d{1,7})? @@.*", re.ASCII)


class PatchError(ValueError):
    """A diff that cannot be parsed, or does not apply."""


@dataclass(slots=True)
class _Hunk:
    line: int  # number of the first old line, from 1
    old: list[str]
    new: list[str]


def apply_patch(reply: str, path: str, text: str) -> str:
    r"""Apply a reply's diff to the file `text`. The diff is in the last code block, or starts at the first `---` line.

    Raises:
        PatchError: there is no diff, it is empty or for a different file, or it does not apply at exactly one position.

    >>> diff = "--- a/sums.py\n+++ b/sums.py\n@@ -1 +1 @@\n-total = a - b\n+total = a + b\n"
    >>> apply_patch(diff, "sums.py", "total = a - b\n")
    'total = a + b\n'
    """
    hunks = _parse(_find_diff(reply), path)
    lines = text.splitlines()
    shift = 0
    for hunk in hunks:
        start = _find(lines, hunk, shift)
        lines[start : start + len(hunk.old)] = hunk.new
        shift += len(hunk.new) - len(hunk.old)
    changed = "\n".join(lines) + "\n"
    if changed == text:
        raise PatchError("the diff changes nothing")
    return changed


def _find_diff(reply: str) -> list[str]:
    block = extract_code(reply) if FENCE in reply else reply
    lines = (block or "").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("--- ")), None)
    if start is None or len(lines) > MAX_DIFF_LINES:
        raise PatchError(f"the reply has no diff of at most {MAX_DIFF_LINES} lines that starts with '--- a/<file>'")
    return lines[start:]


def _parse(lines: list[str], path: str) -> list[_Hunk]:
    _check_files(lines, path)
    hunks: list[_Hunk] = []
    for line in lines[2:]:
        if header := _HUNK.fullmatch(line):
            hunks.append(_Hunk(int(header[1]), [], []))
        elif not hunks or line.startswith(("--- ", "diff ")):
            raise PatchError(f"{line!r} is not a hunk of {path}; only one file may be changed")
        elif not line.startswith("\\"):  # "\\ No newline at end of file"
            hunk = hunks[-1]
            sign = line[:1] or " "  # models write an empty line for empty context
            if sign not in " -+":
                raise PatchError(f"{line!r} starts with none of ' ', '-', '+'")
            if sign != "+":
                hunk.old.append(line[1:])
            if sign != "-":
                hunk.new.append(line[1:])
    if not hunks:
        raise PatchError(f"the diff of {path} has no hunk")
    return hunks


def _check_files(lines: list[str], path: str) -> None:
    """Raise `PatchError` unless the first two lines contain the file's path."""
    if len(lines) < 2 or not lines[1].startswith("+++ "):
        raise PatchError("the line after '--- a/<file>' must be '+++ b/<file>'")
    for line, prefix in zip(lines, ("a/", "b/"), strict=False):
        name = line[4:].partition("\t")[0].strip()
        if name not in (path, prefix + path):
            raise PatchError(f"the diff changes {name!r}; only {path} may be changed")


def _find(lines: list[str], hunk: _Hunk, shift: int) -> int:
    """Return the index of the old lines: the header's index if they match there, else their only match."""
    n_old = len(hunk.old)
    if not n_old:
        raise PatchError("a hunk has no old line; keep a line of context")
    stated = hunk.line - 1 + shift
    if stated >= 0 and lines[stated : stated + n_old] == hunk.old:
        return stated
    found = [start for start in range(len(lines) - n_old + 1) if lines[start : start + n_old] == hunk.old]
    if len(found) != 1:
        raise PatchError(f"the old lines of a hunk occur {len(found)} times in the file: {hunk.old[:3]}")
    return found[0]
