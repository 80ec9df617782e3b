import os
import subprocess
from pathlib import Path

import pytest
from train_kit.processes import TRAIN_FOLDER, python
from train_kit.sysfs import GPU, MAX_CORE, write_sysfs

from skyrl_train.launch import numa
from skyrl_train.launch.numa import bind_to_device, parse_cores


@pytest.mark.parametrize(
    ("text", "cores"), [("0\n", {0}), ("0-3,8\n", {0, 1, 2, 3, 8}), ("2,4-5", {2, 4, 5}), ("\n", set())]
)
def test_cores_of_a_node(text: str, cores: set[int]) -> None:
    assert parse_cores(text) == cores


def test_a_rank_and_its_threads_run_on_the_cores_of_the_node(tmp_path: Path) -> None:
    write_sysfs(tmp_path, 1, f"{MAX_CORE},{MAX_CORE + 1000}")  # a node may have cores that the process may not use
    code = (
        "import os, sys, threading; from pathlib import Path; from skyrl_train.launch import numa; "
        f"numa.SYSFS = Path(sys.argv[1]); numa.bind_to_device({GPU!r}); "
        "thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0))); thread.start(); thread.join()"
    )
    done = subprocess.run(
        [python(), "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == str({MAX_CORE})


def test_an_engine_process_runs_on_the_cores_of_the_node(tmp_path: Path) -> None:
    write_sysfs(tmp_path, 1, str(MAX_CORE))
    code = (
        "import os, sys, threading, torch; from pathlib import Path; from train_kit.sysfs import imitate_gpus; "
        "from skyrl_train.launch.inline import make_beside_gpu; "
        "imitate_gpus(Path(sys.argv[1])); torch.cuda.is_available = lambda: True; "
        "engine = lambda _: threading.Thread(target=lambda: print(os.sched_getaffinity(0))); "
        "thread = make_beside_gpu(engine); thread.start(); thread.join()"
    )
    done = subprocess.run(
        [python(), "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, cwd=TRAIN_FOLDER
    )
    assert done.stdout.strip() == str({MAX_CORE}), done.stderr


@pytest.mark.parametrize(("node", "cores"), [(-1, "0"), (2, "0"), (1, str(MAX_CORE + 1000)), (1, "")])
def test_all_cores_are_kept_without_a_usable_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, cores: str
) -> None:
    monkeypatch.setattr(numa, "SYSFS", write_sysfs(tmp_path, node, cores))
    before = os.sched_getaffinity(0)
    bind_to_device(GPU)
    assert os.sched_getaffinity(0) == before
    bind_to_device("0000:00:00.0")
    assert os.sched_getaffinity(0) == before


def test_a_sandbox_may_forbid_pinning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, cores: set[int]) -> None:
        raise PermissionError(f"{pid}: {cores}")

    monkeypatch.setattr(numa, "SYSFS", write_sysfs(tmp_path, 1, f"0-{MAX_CORE}"))
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    bind_to_device(GPU)
