"""The environments that come with the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skyrl_gym.core import Env
from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.entry_point import load_attribute


@pytest.mark.parametrize("id", BUILT_IN)
def test_entry_point_is_an_env(id: str) -> None:
    assert issubclass(load_attribute(BUILT_IN[id]), Env)


def test_importing_the_package_registers_environments_without_importing_them() -> None:
    code = (
        "import sys, skyrl_gym\n"
        "from skyrl_gym.envs import BUILT_IN\n"
        "print(sorted(BUILT_IN) == sorted(skyrl_gym.registry))\n"
        "print([name for name in sys.modules if name.endswith('.env') or name.startswith('skyrl_gym.adapters')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines() == ["True", "[]"]
