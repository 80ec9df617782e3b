"""Count the phrases that make prose read like a translation, and fail if a package has too many of them.

    python dev/english.py                       a row per package
    python dev/english.py --list skyrl-gym      each occurrence, as file:line
    python dev/english.py --list skyrl-train/skyrl_train/models

Only docstrings, comments and pages are read. The bounds are the highest values of nanochat, prime-rl,
tinker-cookbook, httpx and torchtitan.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("skyrl-train", "skyrl-gym", "skyrl-report", "skyrl-agent", "skyrl-tx", "veritas-rl", "benchmarks", "docs")

MAX_PER_1000_WORDS = {"that of": 0.1, ", which": 0.9, "another one": 0.05}
MAX_SEMICOLONS = 6.0  # in 100 sentences

PATTERNS = {
    "that of": re.compile(r"\b(?:that|those) of\b", re.IGNORECASE),
    ", which": re.compile(r", (?:(?:in|from|for|to|with|at|on|of) )?which\b", re.IGNORECASE),
    "another one": re.compile(r"\b(?:another one|the others|the latter|the former|its own one)\b", re.IGNORECASE),
    ";": re.compile(r";"),
}
CODE = re.compile(r"```.*?```|``.*?``|`[^`]*`|<[^>]*>|\]\([^)]*\)", re.DOTALL)
SENTENCE = re.compile(r"[.!?:](?=\s|$)")


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings, attribute docstrings included, and the comments of a module, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# noqa", "# type:", "#!")):
            yield token.start[0], token.string.lstrip("# ")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each text of a file with the line on which it starts, without code."""
    content = path.read_text()
    for line, text in python_texts(content) if path.suffix == ".py" else [(1, content)]:
        yield line, CODE.sub(lambda code: "\n" * code[0].count("\n") + "x", text)


def files(part: Path) -> list[Path]:
    """Return the modules and pages of a folder, tests and generated pages excluded."""
    found = [part] if part.is_file() else [*part.rglob("*.py"), *part.rglob("*.md")]
    return [p for p in sorted(found) if not {"tests", "node_modules", ".venv"} & set(p.relative_to(ROOT).parts)]


def occurrences(part: Path) -> Iterator[tuple[Path, int, str, str]]:
    """Yield (file, line, pattern, sentence) for each phrase found."""
    for path in files(part):
        for first_line, text in texts(path):
            for name, pattern in PATTERNS.items():
                for found in pattern.finditer(text):
                    line = first_line + text[: found.start()].count("\n")
                    around = " ".join(text[max(0, found.start() - 60) : found.end() + 40].split())
                    yield path, line, name, around


def count(part: Path) -> tuple[int, dict[str, float]]:
    """Return the words of a part, and its rates: per 1,000 words, and semicolons per 100 sentences."""
    prose = [text for path in files(part) for _, text in texts(path)]
    n_words = sum(len(text.split()) for text in prose)
    n_sentences = sum(max(1, len(SENTENCE.findall(text))) for text in prose)
    n_found = {name: sum(len(pattern.findall(text)) for text in prose) for name, pattern in PATTERNS.items()}
    rates = {name: 1000 * n / max(n_words, 1) for name, n in n_found.items()}
    return n_words, rates | {";": 100 * n_found[";"] / max(n_sentences, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, metavar="PATH", help="print each occurrence in a file or folder")
    options = parser.parse_args()
    if options.list is not None:
        for path, line, name, around in occurrences((ROOT / options.list).resolve()):
            print(f"{path.relative_to(ROOT)}:{line}: {name!r}: {around}")
        return 0
    bounds = MAX_PER_1000_WORDS | {";": MAX_SEMICOLONS}
    print(f"{'':14}{'words':>8}" + "".join(f"{name:>14}" for name in bounds))
    has_failed = False
    for part in PARTS:
        n_words, rates = count(ROOT / part)
        cells = [f"{rates[name]:.2f}{'!' if rates[name] > bound else ' '}" for name, bound in bounds.items()]
        has_failed |= any(cell.endswith("!") for cell in cells)
        print(f"{part:14}{n_words:8}" + "".join(f"{cell:>14}" for cell in cells))
    print(f"{'at most':22}" + "".join(f"{bound:>13} " for bound in bounds.values()))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
