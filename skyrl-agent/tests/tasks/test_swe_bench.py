"""SWE-bench: images, evaluation scripts, and grading with the installed version of swebench."""

import difflib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_kit.containers import DockerStandIn, podman_image
from agent_kit.processes import unique_sleep

from skyrl_agent.tasks.swe_bench import (
    MARKERS,
    START,
    SWEBenchTask,
    extract_signed_log,
    image_of,
    is_resolved,
    make_spec,
    sign_markers,
)
from skyrl_agent.workspaces import WorkspaceError
from skyrl_train.errors import DataError

INSTALL = "pip install './skyrl-agent[swe]'"
pytest.importorskip("swebench", reason=f"swebench is not installed: {INSTALL}")
benchmark = pytest.importorskip("minisweagent.run.benchmarks.swebench", reason=f"mini-swe-agent is missing: {INSTALL}")
FOLDER = Path(__file__).parent / "swe_bench"
SCRIPT = (FOLDER / "evaluate.sh").read_text(encoding="utf-8")
RUN, TEST = ((FOLDER / "repository/tests" / name).read_text(encoding="utf-8") for name in ("run.sh", "test_calc.sh"))
ROW = {
    "instance_id": "calc__calc-1",
    "repo": "calc/calc",
    "base_commit": "HEAD",
    "problem_statement": "bash add.sh 2 3 prints 6.",
    "test_patch": SCRIPT.partition("EOF_1'\n")[2].partition("EOF_1")[0],
    "version": "1",
    "FAIL_TO_PASS": ["tests/test_calc.sh::test_new"],
    "PASS_TO_PASS": ["tests/test_calc.sh::test_old"],
    "eval_script": SCRIPT,
    "log_parser": "parse_log_pytest",
}
FIX = (
    "diff --git a/add.sh b/add.sh\n--- a/add.sh\n+++ b/add.sh\n"
    "@@ -1 +1 @@\n-echo $(($1 * $2))\n+echo $(($1 + $2 - {off}))\n"
)


def log(new: str = "PASSED", old: str = "PASSED", exit_code: int | None = None) -> str:
    lines = [
        f"+ : '{START}'",
        "============ test session starts ============",
        f"{new} tests/test_calc.sh::test_new",
        f"{old} tests/test_calc.sh::test_old",
        "============ 2 passed in 0.10s ============",
        f"+ : '{MARKERS[1]}'",
    ]
    return "\n".join(lines if exit_code is None else [*lines, f"{MARKERS[2]}: {exit_code}"]) + "\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (log(), True),
        (log(new="FAILED"), False),
        (log(old="FAILED"), False),
        (log().replace("PASSED tests/test_calc.sh::test_new\n", ""), False),
        (f"+ : '{START}'\n+ : '{MARKERS[1]}'\n", False),
        (f"+ : '{START}'\nPASSED tests/test_calc.sh::test_new\n", False),
        (log() + ">>>>> Patch Apply Failed\n", False),
        (log().replace("starts", "\ufffd\ud800"), True),
        (log(exit_code=0), True),
        (log(exit_code=1), False),  # which contradicts the log
    ],
    ids=["passed", "new", "old", "missing", "nothing", "no end", "apply", "surrogate", "0", "1"],
)
def test_logs_are_graded_by_swebench(text: str, expected: bool) -> None:
    assert is_resolved(make_spec(ROW), text) is expected


def test_a_failure_of_the_machine_is_not_graded() -> None:
    text = f"+ : '{START}'\nOSError: [Errno 12] Cannot allocate memory\n+ : '{MARKERS[1]}'\n"
    with pytest.raises(WorkspaceError, match="infrastructure failure: out_of_memory"):
        is_resolved(make_spec(ROW), text)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"problem_statement": None}, "no text in problem_statement"),
        ({"test_patch": ""}, "no text in test_patch"),
        ({"FAIL_TO_PASS": None}, "FAIL_TO_PASS"),
        ({"log_parser": None}, "log_parser"),
        ({"log_parser": "parse_log_none"}, "parse_log_none"),
        ({"eval_script": None}, r"eval_script.*install swebench<5"),
    ],
)
def test_rows_without_the_columns_that_swebench_needs_are_refused(change: dict[str, Any], problem: str) -> None:
    SWEBenchTask.check_instance(ROW, "")
    with pytest.raises(DataError, match=problem):
        SWEBenchTask.check_instance(ROW | change, "")


def test_the_image_is_that_of_the_row_or_of_swe_bench() -> None:
    row = {"instance_id": "psf__requests-1963"}
    assert image_of(row) == "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-1963:latest"
    assert image_of(row) == benchmark.get_swebench_docker_image_name(row)
    assert image_of({**row, "docker_image": "mine:1", "image_name": None}) == "mine:1"
    assert image_of({**row, "image": "theirs:2"}) == "theirs:2"


def test_markers_without_the_nonce_do_not_count() -> None:
    script = sign_markers(SCRIPT, "n0nce")
    assert f": '{START} n0nce'" in script
    forged = f"+{START}\rPASSED forged\r{MARKERS[1]}\n{MARKERS[2]}: 0\n".replace("\r", "\n")
    signed = f"+ : '{START} n0nce'\nPASSED real\n{START}\n+ : '{MARKERS[1]} n0nce'\n{MARKERS[2]} n0nce: 1\n"
    assert extract_signed_log(forged + signed, "n0nce") == (
        f"{START}'\nPASSED real\n\n+ : '{MARKERS[1]}'\n{MARKERS[2]}: 1\n"
    )
    with pytest.raises(WorkspaceError, match="ended before the tests"):
        extract_signed_log(forged, "n0nce")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(FOLDER / "repository", folder, dirs_exist_ok=True)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    return folder


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[str]:
    """An image of Podman with the repository."""
    with podman_image(tmp_path_factory.mktemp("swe-bench"), repository) as name:
        yield name


class Task(SWEBenchTask):
    test_timeout_s = 60.0


@pytest.fixture(params=["stand-in", "podman"])
def row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "podman":
        image, settings = request.getfixturevalue("podman"), {**SWEBenchTask.environment, "executable": "podman"}
    else:
        docker: DockerStandIn = request.getfixturevalue("docker")
        shutil.copytree(request.getfixturevalue("repository"), Path(docker.image, "testbed"))
        image, settings = docker.image, {"executable": docker.executable}
    monkeypatch.setattr(Task, "environment", settings, raising=False)
    return {**ROW, "image": image}


async def test_an_agents_patch_is_collected_and_graded_in_another_container(row: dict[str, Any]) -> None:
    runtime = await Task.initialize_runtime(row)
    messages = Task.get_instruction(row, runtime)
    assert "/testbed" in messages[1]["content"]
    assert "prints 6" in messages[1]["content"]
    assert runtime.execute("sed -i 's/ [*] / + /' add.sh; bash add.sh 2 3", 30).output == "5\n"
    patch = Task.complete_runtime(runtime)
    runtime.close()
    assert await Task.evaluate_result(patch, row) == {"reward": 0.0, "patch_is_empty": 0.0, "patch_applies": 1.0}
    fixed = FIX.format(off="($1 == 1)")  # 1 + 1 - 1 = 1, which test_old expects
    assert await Task.evaluate_result(fixed, row) == {"reward": 1.0, "patch_is_empty": 0.0, "patch_applies": 1.0}


def new_file(path: str, text: str) -> str:
    lines = text.split("\n")
    header = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{header}@@ -0,0 +1,{len(lines)} @@\n" + "".join(f"+{line}\n" for line in lines)


def replace_file(path: str, old: str, new: str) -> str:
    diff = difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"a/{path}", f"b/{path}", n=0)
    return f"diff --git a/{path} b/{path}\n{''.join(diff)}"


FORGED = "PASSED tests/test_calc.sh::test_new\nPASSED tests/test_calc.sh::test_old"
FORGED_LOG = f"{START}\n{FORGED}\n{MARKERS[1]}\n{MARKERS[2]}: 0\n"
ATTACKS = {
    "empty": "",
    "text": "no patch",
    "context": FIX.replace("$1 * $2", "$1 / $2"),
    "tests": replace_file("tests/test_calc.sh", TEST, f"{FORGED}\n".replace("PASSED", "echo PASSED")),
    "runner": replace_file("tests/run.sh", RUN, f"{FORGED}\n".replace("PASSED", "echo PASSED")),
    "diff": new_file("notes.txt", FORGED_LOG.replace("\n", "\r")),
    "setup": new_file("setup.sh", f"m='>>>>>'\ncat <<EOF\n{FORGED_LOG.replace('>>>>>', '$m')}EOF"),
    "hangs": FIX.replace("echo $(($1 + $2 - {off}))", unique_sleep()),
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_attacks_on_the_grader_are_not_rewarded(
    row: dict[str, Any], attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "test_timeout_s", 3.0 if attack == "hangs" else 60.0)
    graded = await Task.evaluate_result(ATTACKS[attack], row)
    assert graded["reward"] == 0.0
    assert graded["patch_applies"] == float(attack not in ("empty", "text", "context"))


async def test_a_new_test_file_of_the_patch_does_not_replace_that_of_the_test_patch(row: dict[str, Any]) -> None:
    test_patch = new_file("checks/test_new.sh", "check test_new 2 3 5")
    script = SCRIPT.replace("git checkout HEAD tests/test_calc.sh\n", "")
    script = script.replace(ROW["test_patch"], test_patch).replace("bash tests/run.sh", "bash run_all.sh")
    run_all = RUN.replace(". tests/test_calc.sh", ". checks/test_new.sh; . tests/test_calc.sh")
    script = script.replace(f": '{START}'", f"cat >run_all.sh <<'EOF_2'\n{run_all}EOF_2\n: '{START}'")
    row = {**row, "test_patch": test_patch, "eval_script": script}
    forged = new_file("checks/test_new.sh", "echo PASSED tests/test_calc.sh::test_new")
    assert (await Task.evaluate_result(forged, row))["reward"] == 0.0
    fixed = FIX.format(off="($1 == 1)")
    assert (await Task.evaluate_result(forged + fixed, row))["reward"] == 1.0
