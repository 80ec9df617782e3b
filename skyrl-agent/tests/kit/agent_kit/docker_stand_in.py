"""A stand-in for `docker run -d`, `exec` and `rm --force`, for machines without containers.

    python docker_stand_in.py FOLDER run|exec|rm …

An image is a folder; a container is a copy of it below FOLDER. Commands run on this machine, as the current user. In
scripts, /testbed is replaced by the path of the copy; commands of an agent are encoded there and stay as they are.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

VALUES = ("--name", "--stop-signal", "-w", "-e")  # options with a value
MARK = "DOCKER_STAND_IN"


def main(folder: Path, command: str, arguments: list[str]) -> int:
    options: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-"):
        option = arguments.pop(0)
        options.setdefault(option, []).append(arguments.pop(0) if option in VALUES else "")
    name, *rest = arguments
    if command == "run":
        if name == "hangs":
            signal.pause()
        if not Path(name).is_dir():
            sys.exit(f"Unable to find image '{name}'")
        container = options["--name"][-1]
        shutil.copytree(name, folder / container, symlinks=True)
        print(container)  # noqa: T201
        return 0
    root = folder / name
    if not root.is_dir():
        sys.exit(f"Error: No such container: {name}")
    if command == "exec":
        variables = dict(option.split("=", 1) for option in options.get("-e", ()))
        environment = {"PATH": os.environ["PATH"], "HOME": str(root), "TMPDIR": str(root), MARK: name, **variables}
        rest[-1] = rest[-1].replace("/testbed", str(root / "testbed"))
        return subprocess.call(rest, cwd=root, env=environment)
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={name}".encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
    shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
