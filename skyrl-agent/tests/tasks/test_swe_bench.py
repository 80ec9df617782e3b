"""SWE-bench: images, evaluation scripts, and grading with the installed version of swebench."""

from __future__ import annotations

import difflib
import os
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from containers import build_podman_image, remove_podman_image, sleep, write_stand_in

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

pytest.importorskip("minisweagent", reason="mini-swe-agent is not installed: pip install './skyrl-agent[swe]'")
pytest.importorskip("swebench", reason="swebench is not installed: pip install './skyrl-agent[swe]'")

VERSION = int(metadata.version("swebench").partition(".")[0])
needs_4 = pytest.mark.skipif(VERSION != 4, reason="needs swebench 4, which knows repositories")
needs_5 = pytest.mark.skipif(VERSION < 5, reason="needs swebench 5, which reads evaluation scripts from rows")

TEST_PATCH = """diff --git a/test_requests.py b/test_requests.py
--- a/test_requests.py
+++ b/test_requests.py
@@ -1,1 +1,1 @@
-old
+new
"""
ROW = {
    "instance_id": "psf__requests-1963",
    "repo": "psf/requests",
    "base_commit": "110048f9837f8441ea536804115e80b69f400277",  # pragma: allowlist secret
    "problem_statement": "resolve_redirects copies the original request",
    "test_patch": TEST_PATCH,
    "version": "2.3",
    "environment_setup_commit": "110048f9837f8441ea536804115e80b69f400277",  # pragma: allowlist secret
    "FAIL_TO_PASS": '["test_requests.py::RequestsTestCase::test_new"]',
    "PASS_TO_PASS": ["test_requests.py::RequestsTestCase::test_old"],
}
SCRIPT = """#!/bin/bash
set -uxo pipefail
git status
git diff HEAD
[ -e setup.sh ] && bash setup.sh
git checkout HEAD tests/test_calc.sh
git apply -v - <<'EOF_1'
diff --git a/tests/test_calc.sh b/tests/test_calc.sh
--- a/tests/test_calc.sh
+++ b/tests/test_calc.sh
@@ -1,1 +1,2 @@
 check test_old 1 1 1
+check test_new 2 3 5
EOF_1
: '>>>>> Start Test Output'
bash tests/run.sh
: '>>>>> End Test Output'
git checkout HEAD tests/test_calc.sh
"""
TEST = "check test_old 1 1 1\n"
RUN = """failed=0
check() {
    if [ "$(bash add.sh "$2" "$3")" = "$4" ]; then echo "PASSED tests/test_calc.sh::$1"; else
    echo "FAILED tests/test_calc.sh::$1 - wrong"; failed=1; fi
}
. tests/test_calc.sh
exit $failed
"""
CONTAINER_ROW = {
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
PODMAN_IMAGE = f"localhost/skyrl-agent-swe-bench:{os.getpid()}"


def log(new: str = "PASSED", old: str = "PASSED", exit_code: int | None = None) -> str:
    lines = [
        f"+ : '{START}'",
        "============ test session starts ============",
        f"{new} test_requests.py::RequestsTestCase::test_new",
        f"{old} test_requests.py::RequestsTestCase::test_old",
        "============ 2 passed in 0.10s ============",
        f"+ : '{MARKERS[1]}'",
    ]
    return "\n".join(lines if exit_code is None else [*lines, f"{MARKERS[2]}: {exit_code}"]) + "\n"


def spec() -> Any:
    row = {**ROW, "eval_script": SCRIPT, "log_parser": "parse_log_pytest_options"} if VERSION >= 5 else ROW
    return make_spec(row)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (log(), True),
        (log(new="FAILED"), False),
        (log(old="FAILED"), False),
        (log(new="ERROR"), False),
        (log().replace("PASSED test_requests.py::RequestsTestCase::test_new\n", ""), False),
        (log().replace("PASSED", "\x1b[32mPASSED"), False),
        (f"+ : '{START}'\n+ : '{MARKERS[1]}'\n", False),
        (f"+ : '{START}'\nPASSED test_requests.py::RequestsTestCase::test_new\n", False),
        (log() + ">>>>> Patch Apply Failed\n", False),
        (log().replace("starts", "\ufffd\ud800"), True),
    ],
    ids=["passed", "new", "old", "error", "missing", "colour", "nothing", "no end", "apply", "surrogate"],
)
def test_logs_are_graded_by_swebench(text: str, expected: bool) -> None:
    assert is_resolved(spec(), text) is expected


@needs_5
def test_a_log_that_contradicts_the_exit_status_of_the_tests_does_not_resolve() -> None:
    assert is_resolved(spec(), log(exit_code=0))
    assert not is_resolved(spec(), log(exit_code=1))


@needs_5
def test_a_failure_of_the_machine_is_not_graded() -> None:
    text = f"+ : '{START}'\nOSError: [Errno 12] Cannot allocate memory\n+ : '{MARKERS[1]}'\n"
    with pytest.raises(WorkspaceError, match="infrastructure failure: out_of_memory"):
        is_resolved(spec(), text)


@needs_4
def test_swebench_4_knows_how_to_test_its_repositories(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("requests.get", None)  # nothing is downloaded
    script = make_spec(ROW).eval_script
    assert "conda activate testbed" in script
    assert f"git checkout {ROW['base_commit']} test_requests.py" in script
    assert f"git apply -v - <<'EOF_114329324912'\n{TEST_PATCH}" in script
    assert "pytest -rA" in script
    assert script.count(START) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"problem_statement": None}, "no text in problem_statement"),
        ({"test_patch": ""}, "no text in test_patch"),
        ({"FAIL_TO_PASS": None}, "FAIL_TO_PASS"),
        ({"log_parser": None}, "log_parser"),
        ({"log_parser": "parse_log_none"}, "parse_log_none"),
        ({"eval_script": None}, r"eval_script.*install swebench<5"),
        ({}, None),
    ],
)
@needs_5
def test_swebench_5_refuses_rows_without_the_columns_that_it_needs(change: dict[str, Any], problem: str | None) -> None:
    row = {**CONTAINER_ROW, **change}
    if problem is None:
        SWEBenchTask.check_instance(row, "")
    else:
        with pytest.raises(DataError, match=problem):
            SWEBenchTask.check_instance(row, "")


@needs_4
def test_swebench_4_refuses_repositories_that_it_does_not_know() -> None:
    SWEBenchTask.check_instance(ROW, "")
    for change in ({"repo": "getmoto/moto"}, {"version": "77"}, {"FAIL_TO_PASS": None}):
        with pytest.raises(DataError, match=r"swebench 4.* cannot grade psf__requests-1963"):
            SWEBenchTask.check_instance({**ROW, **change}, "")


def test_the_image_is_that_of_the_row_or_of_swe_bench() -> None:
    assert image_of(ROW) == "docker.io/swebench/sweb.eval.x86_64.psf_1776_requests-1963:latest"
    assert image_of({**ROW, "docker_image": "mine:1", "image_name": None}) == "mine:1"
    assert image_of({**ROW, "image": "theirs:2"}) == "theirs:2"
    benchmarks = pytest.importorskip("minisweagent.run.benchmarks.swebench")
    assert image_of(ROW) == benchmarks.get_swebench_docker_image_name(ROW)


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
    (folder / "tests").mkdir()
    (folder / "add.sh").write_text("echo $(($1 * $2))\n", encoding="utf-8")
    (folder / "tests" / "run.sh").write_text(RUN, encoding="utf-8")
    (folder / "tests" / "test_calc.sh").write_text(TEST, encoding="utf-8")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    return folder


@pytest.fixture(scope="module")
def podman_image(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[str]:
    build_podman_image(PODMAN_IMAGE, tmp_path_factory.mktemp("image"), repository)
    yield PODMAN_IMAGE
    remove_podman_image(PODMAN_IMAGE)


class Task(SWEBenchTask):
    test_timeout_s = 20.0


@pytest.fixture(params=["stand-in", "podman"])
def row(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if request.param == "podman":
        monkeypatch.setattr(Task, "environment", {**SWEBenchTask.environment, "executable": "podman"}, raising=False)
        return {**CONTAINER_ROW, "image": request.getfixturevalue("podman_image")}
    image = tmp_path / "image"
    image.mkdir()
    (image / "testbed").symlink_to(request.getfixturevalue("repository"))
    subprocess.run(["cp", "-rL", image / "testbed", image / "copy"], check=True)
    (image / "testbed").unlink()
    (image / "copy").rename(image / "testbed")
    monkeypatch.setattr(Task, "environment", {"executable": write_stand_in(tmp_path)}, raising=False)
    return {**CONTAINER_ROW, "image": str(image)}


@needs_5
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
    "deletes tests": "diff --git a/tests/test_calc.sh b/tests/test_calc.sh\ndeleted file mode 100644\n"
    "--- a/tests/test_calc.sh\n+++ /dev/null\n@@ -1 +0,0 @@\n-check test_old 1 1 1\n",
    "runner": replace_file("tests/run.sh", RUN, f"{FORGED}\n".replace("PASSED", "echo PASSED")),
    "diff": new_file("notes.txt", FORGED_LOG.replace("\n", "\r")),
    "setup": new_file("setup.sh", f"m='>>>>>'\ncat <<EOF\n{FORGED_LOG.replace('>>>>>', '$m')}EOF"),
    "hangs": FIX.replace("echo $(($1 + $2 - {off}))", sleep(30)),
}


@needs_5
@pytest.mark.parametrize("attack", ATTACKS)
async def test_attacks_on_the_grader_are_not_rewarded(
    row: dict[str, Any], attack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "test_timeout_s", 3.0)
    graded = await Task.evaluate_result(ATTACKS[attack], row)
    assert graded["reward"] == 0.0
    assert graded["patch_applies"] == float(attack not in ("empty", "text", "context"))


@needs_5
async def test_a_new_test_file_of_the_patch_does_not_replace_that_of_the_test_patch(row: dict[str, Any]) -> None:
    test_patch = new_file("checks/test_new.sh", "check test_new 2 3 5")
    script = SCRIPT.replace("git checkout HEAD tests/test_calc.sh\n", "")
    script = script.replace(CONTAINER_ROW["test_patch"], test_patch).replace("bash tests/run.sh", "bash run_all.sh")
    run_all = RUN.replace(". tests/test_calc.sh", ". checks/test_new.sh; . tests/test_calc.sh")
    script = script.replace(f": '{START}'", f"cat >run_all.sh <<'EOF_2'\n{run_all}EOF_2\n: '{START}'")
    row = {**row, "test_patch": test_patch, "eval_script": script}
    forged = new_file("checks/test_new.sh", "echo PASSED tests/test_calc.sh::test_new")
    assert (await Task.evaluate_result(forged, row))["reward"] == 0.0
    fixed = FIX.format(off="($1 == 1)")
    assert (await Task.evaluate_result(forged + fixed, row))["reward"] == 1.0


@needs_5
async def test_a_script_that_does_not_come_to_the_tests_is_a_failure(row: dict[str, Any]) -> None:
    script = SCRIPT.replace("git status", "exit 1")
    with pytest.raises(WorkspaceError, match="ended before the tests"):
        await Task.evaluate_result(FIX.format(off="0"), {**row, "eval_script": script})
