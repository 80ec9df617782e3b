import json
from typing import Any

import pytest
from gym_kit.texts import JSON_VALUES
from hypothesis import given, settings
from hypothesis import strategies as st

import skyrl_gym
from skyrl_gym import error
from skyrl_gym.envs import BUILT_IN
from skyrl_gym.envs.base_text_env import BaseTextEnv
from skyrl_gym.envs.registration import EnvSpec, deregister, load_env_creator, make, register, registry, spec


class RowEnv(BaseTextEnv):
    """Keeps its constructor arguments."""

    def __init__(self, env_config: dict[str, Any], extras: dict[str, Any]) -> None:
        super().__init__()
        self.env_config = env_config
        self.extras = extras


ROW_ENV = f"{__name__}:RowEnv"


class TestRegister:
    def test_a_registered_environment_is_found_by_its_id(self) -> None:
        kwargs: dict[str, Any] = {"env_config": {}}
        skyrl_gym.register("row", RowEnv, kwargs=kwargs)
        kwargs.clear()
        assert spec("row") == EnvSpec("row", RowEnv, {"env_config": {}})
        assert registry == {"row": spec("row")}
        assert spec("row").name == "row"
        assert skyrl_gym.spec("row") is spec("row")
        assert skyrl_gym.registry is registry

    def test_an_id_is_registered_once(self) -> None:
        register("row", ROW_ENV)
        with pytest.raises(error.RegistrationError, match=r"'row'.*already registered as .*:RowEnv.*deregister"):
            register("row", "elsewhere:OtherEnv")
        assert spec("row").entry_point == ROW_ENV
        deregister("row")
        with pytest.raises(error.UnregisteredEnv, match="No registered env with id: 'row'"):
            deregister("row")
        register("row", RowEnv)

    def test_user_environment_replaces_a_built_in_one(self) -> None:
        register("gsm8k", BUILT_IN["gsm8k"])
        register("gsm8k", RowEnv)
        assert spec("gsm8k").entry_point is RowEnv
        with pytest.raises(error.RegistrationError, match="already registered"):
            register("gsm8k", RowEnv)

    @pytest.mark.parametrize(
        ("env_id", "entry_point", "kind", "message"),
        [
            ("row", "RowEnv", error.RegistrationError, "must be 'module:attribute'"),
            ("row", "module:", error.RegistrationError, "must be 'module:attribute'"),
            ("row", ":RowEnv", error.RegistrationError, "must be 'module:attribute'"),
            ("row", None, error.RegistrationError, "'row' needs an entry_point"),
            ("row", 3, error.InvalidSpec, "use a class, a function or 'module:attribute'"),
            ("", RowEnv, error.InvalidSpec, "must be a non-empty string"),
            (None, RowEnv, error.InvalidSpec, "must be a non-empty string"),
        ],
    )
    def test_malformed_registration_is_refused(
        self, env_id: Any, entry_point: Any, kind: type[Exception], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            register(env_id, entry_point)
        assert registry == {}


def make_row_env(extras: dict[str, Any], env_config: dict[str, Any]) -> RowEnv:
    return RowEnv(env_config, extras)


class TestMake:
    @pytest.mark.parametrize("entry_point", [RowEnv, ROW_ENV, make_row_env, f"{__name__}:make_row_env"])
    def test_entry_point_may_be_a_class_a_function_or_a_name(self, entry_point: Any) -> None:
        register("row", entry_point)
        env = make("row", env_config={}, extras={"max_turns": 3})
        assert type(env).__name__ == "RowEnv"
        assert isinstance(env, BaseTextEnv)
        assert make("row", env_config={}, extras={}) is not env

    def test_kwargs_of_make_override_registered_ones_and_are_kept(self) -> None:
        register("row", RowEnv, kwargs={"env_config": {"seen": []}, "extras": {"b": 2}})
        extras = {"c": 3}
        env: Any = make("row", extras=extras)
        assert env.extras is extras
        env.env_config["seen"].append("mine")  # registered kwargs are copied
        assert make("row").env_config == {"seen": []}  # type: ignore[attr-defined]
        assert spec("row").kwargs == {"env_config": {"seen": []}, "extras": {"b": 2}}
        assert env.spec == EnvSpec("row", RowEnv, {"env_config": {"seen": ["mine"]}, "extras": extras})

    def test_spec_can_be_made_without_registration(self) -> None:
        env_spec = EnvSpec("row", RowEnv, {"env_config": {}})
        assert isinstance(make(env_spec, extras={}), RowEnv)
        assert isinstance(env_spec.make(extras={}), RowEnv)
        with pytest.raises(error.Error, match="'row' has no entry_point"):
            make(EnvSpec("row"))

    def test_unknown_id_names_the_closest_and_all_known_ids(self) -> None:
        register("multiply", RowEnv)
        register("catch", RowEnv)
        with pytest.raises(error.UnregisteredEnv) as caught:
            make("multipy")
        message = str(caught.value)
        assert "No registered env with id: 'multipy'. Did you mean 'multiply'?" in message
        assert "Registered here: catch, multiply." in message
        assert "import or register the environment in the process that makes it" in message
        registry.clear()
        with pytest.raises(error.UnregisteredEnv) as caught:
            make("chess")
        assert "Did you mean" not in str(caught.value)
        assert "Registered here: none." in str(caught.value)

    def test_errors_of_an_entry_point(self) -> None:
        register("row", RowEnv)
        with pytest.raises(TypeError, match=r"missing 1 required .*'extras'.*'row' with kwargs \{'env_config': \{\}\}"):
            make("row", env_config={})

        def refuse() -> BaseTextEnv:
            raise LookupError("no such task")

        register("refusing", refuse)
        with pytest.raises(LookupError, match=r"^'?no such task'?$"):
            make("refusing")
        register("list", list)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"'list' must return a skyrl_gym\.Env, got list"):
            make("list")


class TestLoadEnvCreator:
    def test_missing_module_names_the_entry_point(self) -> None:
        with pytest.raises(ModuleNotFoundError) as caught:
            load_env_creator("no_such_module:Env")
        assert caught.value.__notes__ == ["while importing the entry point 'no_such_module:Env'"]


class TestJson:
    @settings(max_examples=50)
    @given(st.text(min_size=1), st.none() | st.just(ROW_ENV), st.dictionaries(st.text(), JSON_VALUES, max_size=3))
    def test_a_spec_survives_the_round_trip(self, env_id: str, entry_point: str | None, kwargs: dict[str, Any]) -> None:
        env_spec = EnvSpec(env_id, entry_point, kwargs)
        assert EnvSpec.from_json(env_spec.to_json()) == env_spec
        assert json.loads(env_spec.to_json()).keys() == {"id", "entry_point", "kwargs"}

    def test_objects_cannot_be_written_as_json(self) -> None:
        with pytest.raises(ValueError, match="cannot be written as JSON; use 'module:attribute'"):
            EnvSpec("row", RowEnv).to_json()
        with pytest.raises(ValueError, match="the kwargs of 'row' cannot be written as JSON"):
            EnvSpec("row", ROW_ENV, {"callback": print}).to_json()

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "not the JSON of an EnvSpec"),
            ("[]", "is an object with id, entry_point, kwargs"),
            ("{}", "has the keys id, entry_point and kwargs"),
            ('{"id": "row", "colour": 1}', r"got \['colour', 'id'\]"),
            ('{"id": 3}', "must be a non-empty string"),
            ('{"id": "row", "kwargs": [1]}', "must be a dict"),
            ('{"id": "row", "entry_point": "RowEnv"}', "must be 'module:attribute'"),
        ],
    )
    def test_anything_else_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            EnvSpec.from_json(text)
        assert isinstance(caught.value, error.InvalidSpec)


def test_registry_and_specs_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for env_id in ["text2sql", "aime", "catch", "gsm8k"]:
        register(env_id, RowEnv)
    columns = "aime      catch\ngsm8k     text2sql"
    assert skyrl_gym.pprint_registry(num_cols=2, disable_print=True) == columns
    assert skyrl_gym.pprint_registry(num_cols=2) is None
    assert capsys.readouterr().out == f"{columns}\n"
    assert skyrl_gym.pprint_registry({}, disable_print=True) == ""
    env_spec = EnvSpec("row", ROW_ENV, {"extras": {"a": 1}})
    assert env_spec.pprint(disable_print=True) == "id=row\nextras={'a': 1}"
    assert env_spec.pprint(include_entry_points=True) is None
    assert capsys.readouterr().out == f"id=row\nentry_point={ROW_ENV}\nextras={{'a': 1}}\n"
