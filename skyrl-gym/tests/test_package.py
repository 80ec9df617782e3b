import doctest
import re
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
from gym_kit.processes import run_python

import skyrl_gym

README = Path(__file__).parents[1] / "README.md"
PACKAGE = Path(skyrl_gym.__file__).parent
WITH_EXAMPLES = sorted(file.relative_to(PACKAGE.parent) for file in PACKAGE.rglob("*.py") if ">>> " in file.read_text())
HEAVY = ("torch", "ray", "numpy", "pandas", "transformers")


def test_importing_skyrl_gym_loads_only_the_standard_library() -> None:
    code = f"import sys, skyrl_gym, skyrl_gym.envs.base_text_env; print([m for m in {HEAVY} if m in sys.modules])"
    assert run_python(code).stdout.strip() == "[]"


def test_exported_names_and_the_mark_of_types_exist() -> None:
    assert all(hasattr(skyrl_gym, name) for name in skyrl_gym.__all__)
    assert all(hasattr(skyrl_gym.envs, name) for name in skyrl_gym.envs.__all__)
    assert (files("skyrl_gym") / "py.typed").is_file()


def test_readme_example_prints_its_documented_output(capsys: pytest.CaptureFixture[str]) -> None:
    text = README.read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
    exec(compile(program, str(README), "exec"), {"__name__": "readme"})
    (promised,) = re.findall(r"This prints `(.*?)`", text)
    assert capsys.readouterr().out.strip() == promised


@pytest.mark.parametrize("file", WITH_EXAMPLES, ids=str)
def test_examples_in_docstrings_run(file: Path) -> None:
    module = import_module(".".join(file.with_suffix("").parts).removesuffix(".__init__"))
    assert doctest.testmod(module).failed == 0
