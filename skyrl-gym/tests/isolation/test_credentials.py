from pathlib import Path

import pytest
from gym_kit.processes import run_python

from skyrl_gym.isolation.credentials import is_readable_by_all, throwaway_user

CODE = """
import os, sys
from gym_kit.processes import attempt
from skyrl_gym.isolation.credentials import CAP_DAC_READ_SEARCH, become_user, throwaway_user

user, secret = throwaway_user(), sys.argv[1]
attempt(become_user, user, [CAP_DAC_READ_SEARCH][: int(sys.argv[2])])
print(
    os.getresuid() == os.getresgid() == (user, user, user),
    os.getgroups(),
    throwaway_user(),
    attempt(lambda: open(secret).read()),
    attempt(open, secret, "r+"),
    attempt(os.setuid, 0),
    attempt(os.kill, os.getppid(), 0),
)
"""


@pytest.mark.skipif(throwaway_user() is None, reason="this process may not change its user")
@pytest.mark.parametrize(("n_capabilities", "text"), [(0, "PermissionError"), (1, "hunter2")])
def test_root_becomes_a_user_without_rights(tmp_path: Path, n_capabilities: int, text: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    secret.chmod(0o600)
    output = run_python(CODE, str(secret), str(n_capabilities)).stdout
    assert output.split() == ["True", "[]", "None", text, *["PermissionError"] * 3]


def test_readable_by_all(tmp_path: Path) -> None:
    assert is_readable_by_all(["/usr/lib", "/missing"])
    (tmp_path / "inside").mkdir()
    tmp_path.chmod(0o700)
    assert not is_readable_by_all([str(tmp_path)])
    assert not is_readable_by_all([str(tmp_path / "inside")])
