"""Issues of SWE-bench (Jimenez et al., 2023, arXiv:2310.06770), graded by the package swebench."""

import json
import tempfile
import uuid
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from skyrl_agent.tasks.patches import changed_paths
from skyrl_agent.tasks.repository import RepositoryTask, require_text
from skyrl_agent.workspaces import ContainerWorkspace, Workspace, WorkspaceError
from skyrl_train.errors import DataError

COLUMNS = ("instance_id", "repo", "base_commit", "problem_statement", "test_patch")
TEST_COLUMNS = ("FAIL_TO_PASS", "PASS_TO_PASS")
MAX_LOG_BYTES = 32 << 20
START = ">>>>> Start Test Output"
MARKERS = (START, ">>>>> End Test Output", ">>>>> Test Exit Code")
"""Lines in the evaluation's log between which swebench looks for results."""


class SWEBenchTask(RepositoryTask):
    """An issue of SWE-bench or a dataset in its format.

    The container uses the image in `image_name`, `docker_image` or `image`, or else SWE-bench's published image.
    swebench 5 grades rows that have `eval_script`, `log_parser` and `FAIL_TO_PASS`, like the current SWE-bench
    datasets. swebench 4 grades rows without a script, for the repositories and versions that it knows. Add these
    columns to rows of other datasets, such as SWE-Gym.

    Code under test runs in the tests' process, so a patch can still forge their output.
    """

    cwd: ClassVar[str] = "/testbed"

    environment: ClassVar[Mapping[str, Any]] = {
        "pull_timeout": 1200,
        "container_timeout": "6h",
        "env": {
            "PAGER": "cat",
            "MANPAGER": "cat",
            "LESS": "-R",
            "PIP_PROGRESS_BAR": "off",
            "TQDM_DISABLE": "1",
            "BASH_ENV": "/root/.bashrc",  # activates the repository's conda environment
        },
    }

    @classmethod
    def create_workspace(cls, instance: Mapping[str, Any]) -> Workspace:
        """Return the instance's container, not started yet."""
        return ContainerWorkspace(image_of(instance), cls.cwd, cls.environment)

    @classmethod
    def prepare(cls, workspace: Workspace, instance: Mapping[str, Any]) -> None:
        """Do nothing: the image contains the repository."""

    @classmethod
    def test_paths(cls, instance: Mapping[str, Any]) -> list[str]:
        """Return the paths in the test patch."""
        return changed_paths(instance["test_patch"])

    @classmethod
    def run_tests(cls, workspace: Workspace, instance: Mapping[str, Any]) -> bool:
        """Run swebench's evaluation script and grade its log. The script applies the test patch."""
        spec = make_spec(instance)
        nonce = uuid.uuid4().hex
        path = f"{workspace.run('mktemp -d').strip()}/eval.sh"
        workspace.write_bytes(path, sign_markers(spec.eval_script, nonce).encode())
        result = workspace.execute(f"bash {path}", cls.test_timeout_s, MAX_LOG_BYTES)
        if result.status is None:
            return False
        return is_resolved(spec, extract_signed_log(result.output, nonce))

    @classmethod
    def check_instance(cls, instance: Any, data_source: str) -> None:
        """Raise DataError if a column is missing or the installed swebench cannot grade the row."""
        require_text(instance, COLUMNS)
        make_spec(instance)


def image_of(instance: Mapping[str, Any]) -> str:
    """Return an instance's image: the row's, or else SWE-bench's published image."""
    for column in ("image_name", "docker_image", "image"):
        if instance.get(column):
            return str(instance[column])
    name = instance["instance_id"].replace("__", "_1776_").lower()  # images cannot have two underscores in a row
    return f"docker.io/swebench/sweb.eval.x86_64.{name}:latest"


def make_spec(instance: Mapping[str, Any]) -> Any:
    """Return swebench's `TestSpec` for an instance.

    Raises:
        DataError: the installed version of swebench cannot grade the instance.
        ModuleNotFoundError: it is not installed.
    """
    try:
        version = metadata.version("swebench")
    except metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(
            "SWEBenchTask needs the package swebench: pip install './skyrl-agent[swe]' (in your clone of the "
            "repository)"
        ) from error
    row = {name: value for name, value in instance.items() if value is not None}
    try:
        return _spec_of_5(row) if int(version.partition(".")[0]) >= 5 else _spec_of_4(row)
    except KeyError as error:
        raise DataError(
            f"swebench {version} cannot grade {row['instance_id']}: it lacks {error}. swebench 5 needs the columns "
            "eval_script and log_parser; without them, install swebench<5, which knows the repositories of SWE-bench"
        ) from error


def _spec_of_5(row: dict[str, Any]) -> Any:
    from swebench.harness.log_parsers import PARSER_REGISTRY
    from swebench.harness.utils import make_test_spec

    spec = make_test_spec({"image": image_of(row), "version": "", "eval_type": "pass_and_fail", **row})
    PARSER_REGISTRY[spec.log_parser]  # raises KeyError
    return spec


def _spec_of_4(row: dict[str, Any]) -> Any:
    """Return the `TestSpec` without scripts for building images, since `make_test_spec` downloads files for them."""
    from swebench.harness.constants import MAP_REPO_TO_EXT, MAP_REPO_VERSION_TO_SPECS
    from swebench.harness.test_spec.create_scripts import make_eval_script_list
    from swebench.harness.test_spec.test_spec import TestSpec

    repo, test_patch = row["repo"], row["test_patch"]
    specs = MAP_REPO_VERSION_TO_SPECS[repo][row["version"]]
    tests = {name: json.loads(row[name]) if isinstance(row[name], str) else row[name] for name in TEST_COLUMNS}
    return TestSpec(
        instance_id=row["instance_id"],
        repo=repo,
        version=row["version"],
        repo_script_list=[],
        eval_script_list=make_eval_script_list(row, specs, "testbed", "/testbed", row["base_commit"], test_patch),
        env_script_list=[],
        arch="x86_64",
        language=MAP_REPO_TO_EXT[repo],
        docker_specs={},
        namespace=None,
        **tests,
    )


def sign_markers(script: str, nonce: str) -> str:
    """Return the evaluation script with a nonce in its markers. A patch cannot know it when it is written."""
    for marker in MARKERS:
        script = script.replace(marker, f"{marker} {nonce}")
    return script


def extract_signed_log(log: str, nonce: str) -> str:
    """Return the part of a log from the signed marker on, with the markers that swebench expects.

    Markers without the nonce are removed. They come from the patch, since the script prints it, or from code that the
    script runs before the tests, such as a setup.py.

    Raises:
        WorkspaceError: the script did not reach the tests.
    """
    for i, marker in enumerate(MARKERS):
        log = log.replace(f"{marker} {nonce}", f"\0{i}").replace(marker, "").replace(f"\0{i}", marker)
    if START not in log:
        raise WorkspaceError(f"the evaluation script ended before the tests: {log[-500:]}")
    return log[log.index(START) :]


def is_resolved(spec: Any, log: str) -> bool:
    """Return True if all tests that must pass do so in the evaluation script's log.

    Raises:
        WorkspaceError: swebench attributes the lack of results to the machine.
    """
    from swebench.harness.grading import get_eval_report

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "test_output.txt")
        path.write_text(log, encoding="utf-8", errors="replace")
        prediction = {"instance_id": spec.instance_id, "model_name_or_path": "agent", "model_patch": "applied"}
        report = get_eval_report(spec, prediction, str(path), include_tests_status=False)[spec.instance_id]
    if report.get("infra_failure"):
        raise WorkspaceError(f"swebench reports an infrastructure failure: {report['infra_failure_reason']}")
    return bool(report["resolved"])
