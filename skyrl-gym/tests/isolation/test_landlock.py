"""Landlock at every version of its interface, in processes of their own, since nothing lifts a restriction."""

from pathlib import Path

import pytest
from gym_kit.processes import run_python

from skyrl_gym.isolation.landlock import SCOPE_VERSION, landlock_version

pytestmark = pytest.mark.skipif(landlock_version() == 0, reason="this kernel has no Landlock")

CODE = """
import os, signal, sys
from gym_kit.processes import attempt
from skyrl_gym.isolation.landlock import restrict_access

parent, folder, version = os.getppid(), sys.argv[1], int(sys.argv[2])
os.chdir(folder + "/inside")
restrict_access([folder + "/readable", folder + "/missing"], [".", os.devnull], version)
print(
    attempt(lambda: open("file", "w").write("text")),
    attempt(lambda: open(os.devnull, "w").write("text")),
    attempt(lambda: open(folder + "/readable/file").read()),
    attempt(open, folder + "/readable/file", "r+"),
    attempt(lambda: open(folder + "/secret").read()),
    attempt(os.unlink, folder + "/secret"),
    attempt(os.listdir, folder),
    attempt(os.mkfifo, "fifo"),
    attempt(os.mknod, "socket", 0o140600),
    attempt(open, f"/proc/{parent}/environ"),
    attempt(os.kill, parent, 0),
)
"""


@pytest.mark.parametrize("version", range(1, landlock_version() + 1))
def test_only_named_files_can_be_opened(tmp_path: Path, version: int) -> None:
    for name in ("inside", "readable"):
        (tmp_path / name).mkdir()
    (tmp_path / "readable" / "file").write_text("shared")
    (tmp_path / "secret").write_text("hunter2")
    output = run_python(CODE, str(tmp_path), str(version)).stdout
    signal = "PermissionError" if version >= SCOPE_VERSION else "None"
    refused = "PermissionError"
    assert output.split() == ["4", "4", "shared", *[refused] * 4, "None", refused, refused, signal]
    assert (tmp_path / "secret").read_text() == "hunter2"
