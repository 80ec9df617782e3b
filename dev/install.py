"""Install packages into a virtual environment with uv, three times as fast as pip.

    python dev/install.py .venv -c constraints.txt -e skyrl-train

All arguments after the folder go to `uv pip install`. uv does not read pip's configuration, so this script passes on
pip's indexes, find-links, constraints and certificates. UV_ variables override them.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# pip's setting: (environment variable, separator of its values). A constraint becomes an argument, because -c overrides
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
    environment = read_pip_settings(listed) | os.environ
    environment.setdefault("UV_SYSTEM_CERTS", "1")  # as pip does
    if "UV_INDEX" in environment:  # take the newest version of any index, as pip does
        environment.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    quiet = ["-qq", "--disable-pip-version-check"]
    subprocess.run([python, "-m", "pip", "install", *quiet, "-c", "constraints.txt", "uv"], check=True)
    uv = [python, "-m", "uv", "pip", "install", "--quiet", "--compile-bytecode", "--python", python]
    constraints = [f"--constraint={path}" for path in environment.get("PIP_CONSTRAINT", "").split()]
    sys.exit(subprocess.run([*uv, *constraints, *sys.argv[2:]], env=environment).returncode)


def read_pip_settings(config: str) -> dict[str, str]:
    """Convert the output of `pip config list` to uv's variables: `global.find-links='/a /b'` to UV_FIND_LINKS=/a,/b."""
    variables = {}
    # A setting can appear in several sections. [install] overrides [global], and the environment overrides both.
    for wanted in ("global", "install", ":env:"):
        for line in config.splitlines():
            key, _, value = line.partition("=")
            section, _, name = key.rpartition(".")
            if section == wanted and name in SETTINGS:
                variable, separator = SETTINGS[name]
                variables[variable] = separator.join(ast.literal_eval(value).split())
    return variables


if __name__ == "__main__":
    main()
