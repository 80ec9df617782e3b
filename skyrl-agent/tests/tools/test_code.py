import pytest
from gym_kit.http_server import serving

from skyrl_agent.tools.base import create_tools
from skyrl_gym.error import ToolFailure


def use(code: str) -> str:
    tool = create_tools([{"name": "code_interpreter", "timeout": 5}])["code_interpreter"]
    return str(tool.call({"code": code}, agent=None, trajectory_id=""))  # type: ignore[arg-type]


def test_programs_run_on_this_machine() -> None:
    assert use("print(6 * 7)") == "42"
    assert use("pass") == "(the program printed nothing)"
    assert "ZeroDivisionError" in use("1 / 0")


def test_programs_run_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    result = {"status": "Finished", "stdout": "", "stderr": "boom", "return_code": 1}
    with serving(lambda request: (200, {"status": "Failed", "run_result": result})) as (url, requests):
        monkeypatch.setenv("SANDBOX_FUSION_URL", url)
        assert use("x") == "boom"
        assert requests[0].body == {"code": "x", "language": "python", "run_timeout": 5.0}
    with serving(lambda request: (200, "not JSON")) as (url, _):
        monkeypatch.setenv("SANDBOX_FUSION_URL", url)
        with pytest.raises(ToolFailure, match=r"the sandbox at .* failed"):
            use("x")
