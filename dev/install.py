"""Install packages into a virtual environment with uv, which needs a third of pip's time.

    python dev/install.py .venv -c constraints.txt -e skyrl-train

The arguments after the folder are those of `uv pip install`. uv does not read pip's configuration, so the indexes,
wheels, constraints and certificates that pip is configured with are passed on. The UV_ variables override them.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# pip's setting, uv's variable, and what separates its values. A constraint becomes an argument, because -c overrides
# UV_CONSTRAINT.
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "constraint": ("PIP_CONSTRAINT", " "),
}


def main() -> None:
    python = str(Path(sys.argv[1]) / "bin/python")
    if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode:
        subprocess.run([python, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
    listed = subprocess.run([python, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    environment = from_pip(listed) | os.environ
    if "UV_INDEX" in environment:  # take the newest version of any index, as pip does
        environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    quiet = ["-qq", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, "-c", "constraints.txt", "uv"], check=True)
    uv = [python, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
    constraints = [f"--constraint={path}" for path in environment.get("PIP_CONSTRAINT", "").split()]
    sys.exit(subprocess.run([*uv, *constraints, *sys.argv[2:]], env=environment).returncode)


def from_pip(listed: str) -> dict[str, str]:
    """Return uv's variables for `pip config list`: the line `global.find-links='/a /b'` gives UV_FIND_LINKS=/a,/b."""
    variables = {}
    # The same setting can stand in several sections. pip lets [install] override [global], and the environment both.
    for line in sorted(listed.splitlines(), key=lambda line: (line.startswith(":env:"), line.startswith("install."))):
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in SETTINGS:
            variable, separator = SETTINGS[name]
            variables[variable] = separator.join(ast.literal_eval(value).split())
    return variables


if __name__ == "__main__":
    main()
