"""Task folders in Harbor's format."""

from pathlib import Path

SETTINGS = """\
schema_version = "1.4"

[task]
name = "tests/{name}"

[agent]
timeout_sec = 20.0

[verifier]
timeout_sec = 20.0
env = {{ EXPECTED = "right" }}
"""
TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
reward=0
if [ "$(cat /app/answer.txt)" = "$EXPECTED" ] && [ -e /app/given.txt ] && [ -e /tests/data.txt ]; then reward=1; fi
echo $reward > /logs/verifier/reward.txt
"""


def write_harbor_task(folder: Path, instruction: str, settings: str = "", dockerfile: str | None = None) -> Path:
    """Write a task whose answer is `right` in /app/answer.txt."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(SETTINGS.format(name=folder.name) + settings)
    (folder / "instruction.md").write_text(f"<!-- harbor-canary GUID 1 -->\n\n{instruction}\n")
    (folder / "environment/given.txt").write_text("given")
    (folder / "tests/test.sh").write_text(TEST)
    (folder / "tests/data.txt").write_text("x")
    (folder / "solution/solve.sh").write_text("#!/bin/bash\necho right > /app/answer.txt\n")
    if dockerfile is not None:
        (folder / "environment/Dockerfile").write_text(dockerfile)
    return folder
