"""Examples in docstrings print what they show."""

import ast
import doctest
import importlib
from pathlib import Path

import pytest

import skyrl_train

PACKAGE = Path(skyrl_train.__file__).parent


def _find_examples() -> list[tuple[str, str, str]]:
    """Return (module, name, docstring) of everything with an example.

    doctest's own finder misses functions that a decorator of another module wraps, such as policy losses.
    """
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node) or ""
                if ">>> " in docstring:
                    found.append((module, getattr(node, "name", "module"), docstring))
    return found


@pytest.mark.parametrize(("module", "name", "docstring"), [pytest.param(*e, id=e[1]) for e in _find_examples()])
def test_examples_in_docstrings(module: str, name: str, docstring: str) -> None:
    names = dict(vars(importlib.import_module(module)))
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(doctest.DocTestParser().get_doctest(docstring, names, name, module, 0), out=report.append)
    assert not report, "".join(report)
