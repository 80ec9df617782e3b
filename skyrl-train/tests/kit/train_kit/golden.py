"""Texts that the code prints, kept in files under `tests/golden`, so that tests list only the cases.

A case that is a command line may be in the file only, see `read`: add a line there to add one. A test compares all
cases of a file at once. `pytest --update` rewrites the file, and the diff of the commit shows what changed:

    trainer.train_batch_size=64 trainer.policy_mini_batch_size=48
        trainer.policy_mini_batch_size=48 must divide trainer.train_batch_size=64; try 32 or 64
"""

from collections.abc import Callable, Iterable, Mapping
from difflib import unified_diff
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "golden"


def compare(name: str, cases: Mapping[str, Iterable[str]], config: pytest.Config, folder: Path = FOLDER) -> None:
    """Fail if the lines of a case differ from the folder's `<name>.txt`; with `--update`, write the file instead."""
    file, text = folder / f"{name}.txt", "\n".join(_format(case, lines) for case, lines in cases.items())
    if config.getoption("--update"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    expected = file.read_text(encoding="utf-8") if file.exists() else ""
    if text != expected:
        diff = unified_diff(
            expected.splitlines(), text.splitlines(), f"golden/{name}.txt", "this run", n=1, lineterm=""
        )
        pytest.fail("\n".join([*diff, "If the new text is right, run this test with --update."]), pytrace=False)


def read(name: str, folder: Path = FOLDER) -> dict[str, list[str]]:
    """Return the cases in `golden/<name>.txt`, its lines without indent, and the lines of each."""
    cases: dict[str, list[str]] = {}
    for line in (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            cases[next(reversed(cases))].append(line.strip())
        elif line:
            cases[line] = []
    return cases


def catch(kind: type[Exception], call: Callable[[], object], folder: Path | None = None) -> str:
    """Return the message of the error that a call raises, with `folder`, which differs between runs, as "…"."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value).replace(str(folder), "…") if folder else str(caught.value)


def _format(case: str, lines: Iterable[str]) -> str:
    """Return the name of a case and its indented lines."""
    return "\n".join([case, *(f"    {line}" for text in lines for line in text.splitlines())]) + "\n"
