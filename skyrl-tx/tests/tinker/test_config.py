import re
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from tx.tinker.config import (
    TxConfig,
    argument_parser,
    arguments_of,
    environment_of,
    parse_config,
    state_folder,
    unnamed_user,
)


def parse(*arguments: str, **environment: str) -> TxConfig:
    return parse_config(["--base-model", "org/m", *arguments], program="tx", environment=environment)


def test_the_default_folder_is_for_user_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    config = parse()
    assert config.checkpoints_base == state_folder() == tmp_path / "skyrl-tx"
    assert config.database_url == f"sqlite:///{tmp_path}/skyrl-tx/tinker.db"


def test_secrets_come_from_the_environment_and_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("tml-one\n\n  tml-two  \n")
    environment = {
        "TX_DATABASE_URL": "postgresql://u:p@h/d",
        "TX_API_KEYS": "tml-three, ",  # pragma: allowlist secret
        "TX_EXTERNAL_INFERENCE_API_KEY": "k",
    }
    config = parse("--api-keys-file", str(tmp_path / "keys"), **environment)
    assert [key.get_secret_value() for key in config.api_keys] == ["tml-one", "tml-two", "tml-three"]
    assert config.database_url == "postgresql://u:p@h/d"
    assert config.external_inference_api_key == SecretStr("k")
    arguments = " ".join(arguments_of(config))
    assert not any(secret in arguments for secret in ("tml-", "postgresql", "p@h"))
    assert "tml-" not in str(environment_of(config)) + str(config)


def test_keys_may_name_their_users() -> None:
    config = parse(TX_API_KEYS="alice=tml-a==,alice=tml-b,tml-c=")
    assert config.users_by_key == {"tml-a==": "alice", "tml-b": "alice", "tml-c=": unnamed_user("tml-c=")}


def test_the_engine_gets_the_same_settings(tmp_path: Path) -> None:
    config = parse(
        *("--backend-config", '{"compile_cache": "/x y", "sample_lanes": 4}'),
        *("--checkpoints-base", str(tmp_path / "with space")),
        *("--session-timeout-sec", "-1", "--external-inference-url", "http://x", "--compress-passes"),
    )
    again = parse_config(arguments_of(config), program="engine", environment=environment_of(config))
    assert again == config
    assert again.compress_passes
    assert "--no-compress-passes" in arguments_of(parse())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-model", "/nowhere/m"], "--base-model='/nowhere/m': the folder does not exist"),
        (["--hold-sec", "60"], "--hold-sec='60'"),
        (["--backend-config", "{"], "Expecting property name"),
        (["--backend-config", '{"dtyp": 1}'], "dtyp=1: Extra inputs are not permitted; jax knows dtype, gradient_"),
        (["--api-keys-file", "/dev/null"], "/dev/null has no key"),
        (["--api-keys-file", "/nowhere/keys"], "/nowhere/keys"),
        (["--unknown", "1"], "unknown flag --unknown"),
        (["--base-mdoel", "m"], "unknown flag --base-mdoel. Did you mean --base-model?"),
        (["--api-keys", "tml-x"], "--api-keys"),
    ],
)
def test_invalid_settings_exit_with_a_message(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*arguments)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (" ,", "TX_API_KEYS has no key, and without keys anyone could use the server"),
        ("alice=tml-a,bob=tml-a", "users alice and bob have the same API key; give each user a different one"),
    ],
)
def test_invalid_keys(keys: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(TX_API_KEYS=keys)
    output = capsys.readouterr().err
    assert (words in output, "tml-a" in output) == (True, False)


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("--backend", "torch").backend == "torch"
    monkeypatch.setitem(sys.modules, "skyrl_train", None)
    with pytest.raises(SystemExit):
        parse("--backend", "torch")
    words = "skyrl_train is not installed; pip install ./skyrl-gym ./skyrl-report ./skyrl-train './skyrl-tx[torch]'"
    assert words in capsys.readouterr().err
    assert parse().backend == "jax"


def test_every_field_is_documented_and_no_secret_is_a_flag() -> None:
    help_text = argument_parser("tx").format_help()
    for name, field in TxConfig.model_fields.items():
        assert field.description, name
        is_flag = re.search(rf"--{name.replace('_', '-')}[ \],]", help_text) is not None
        assert is_flag == (name not in ("api_keys", "external_inference_api_key")), name
