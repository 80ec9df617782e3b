import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_gym.isolation.command import Isolation, isolate_command

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "[threading.Thread(target=time.sleep, args=(9,), daemon=True).start() for _ in range(99)]",
            "processes and threads",
        ),
        ("[open(f'/tmp/{i}', 'wb').write(bytes(1 << 20)) for i in range(9)]", "MiB of files"),
        ("[open(f'/tmp/{i}', 'wb') for i in range(99)]", "files, or a folder"),
        ("os.mkdir('/tmp/a', 0o300)", "a folder that cannot be listed"),
        ("f = os.memfd_create(''); os.write(f, bytes(200 << 20))", "MiB of memory"),
    ],
)
def test_a_command_beyond_a_limit_is_killed(source: str, reason: str, tmp_path: Path) -> None:
    for name in ("root", "tmp"):
        (tmp_path / name).mkdir()
    isolation = Isolation(
        str(tmp_path / "root"),
        {"/tmp": str(tmp_path / "tmp")},
        "/tmp",
        env={"PATH": "/usr/bin:/bin"},
        n_threads=50,
        memory_bytes=150 << 20,
        total_bytes=4 << 20,
        n_files=50,
    )
    launch = isolate_command(isolation, ["python3", "-ISc", f"import os, threading, time\n{source}\ntime.sleep(20)"])
    done = subprocess.run(launch.argv, input=launch.stdin, capture_output=True, timeout=60)
    assert done.returncode == 137
    assert f"{reason}" in done.stderr.decode()
