from pathlib import Path

import pytest
from agent_kit.harnesses import PREFIX

from skyrl_agent import leases, workspaces


@pytest.fixture(autouse=True)
def own_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test a folder of leases, and names by which its processes can be found."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(workspaces, "new_name", lambda: PREFIX + leases.new_name())
