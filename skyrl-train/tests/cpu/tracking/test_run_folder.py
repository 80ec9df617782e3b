import logging
from pathlib import Path

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.tracking import create_run_folder, log_to_file


@pytest.mark.parametrize(("project", "run"), [("..", "run"), ("catch", ""), ("/etc", "run"), ("catch", "../..")])
def test_a_run_stays_inside_the_output_folder(tmp_path: Path, project: str, run: str) -> None:
    with pytest.raises(ConfigError, match="must name a folder inside"):
        create_run_folder(tmp_path, project, run)


def test_the_log_file_is_attached_within_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run" / "train.log"
    package = logging.getLogger("skyrl_train")
    before = (list(package.handlers), package.level)
    logger = logging.getLogger("skyrl_train.trainer")
    with log_to_file(path):
        logger.info("first")
        logging.getLogger("skyrl_gym.envs").warning("half a character: \ud83d")
        logging.getLogger("skyrl_agent.endpoint.server").info("third")
    logger.warning("after")
    assert (list(package.handlers), package.level) == before
    lines = path.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["first", "half a character: \\ud83d", "third"]
    assert "INFO skyrl_train.trainer" in lines[0]
    assert "Logging error" not in capsys.readouterr().err
