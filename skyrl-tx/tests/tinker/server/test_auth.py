import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from pydantic import SecretStr
from tinker import types
from tx_kit.servers import BASE_MODEL, Running, assert_refused, new_model, new_session, serving

from tx.tinker.server.auth import KeyCheck

KEYS = ("tml-alice", "tml-bob")


SERVER_SETTINGS = {"api_keys": tuple(map(SecretStr, KEYS))}


def as_user(server: Running, name: str) -> httpx.Client:
    return server.client(**{"X-API-Key": f"tml-{name}"})


@pytest.mark.parametrize(
    ("method", "path", "headers", "words"),
    [
        ("POST", "create_session", {}, "needs an API key"),
        ("GET", "checkpoints", {"X-API-Key": "tml-eve"}, "API key is unknown to this server"),
        ("GET", "/", {"X-API-Key": "é"}, "API key is unknown to this server"),
        ("GET", "/metrics", {"Authorization": "Basic !"}, "needs an API key"),
    ],
)
def test_without_a_key(server: Running, method: str, path: str, headers: dict[str, str], words: str) -> None:
    url = server.url + path if path.startswith("/") else f"{server.url}/api/v1/{path}"
    encoded = {name: value.encode("latin-1") for name, value in headers.items()}
    refused = httpx.request(method, url, headers=encoded, json={"tags": []} if method == "POST" else None)
    assert_refused(refused, words, status=401)


def test_basic_and_bearer_authentication(server: Running) -> None:
    """Health needs no key."""
    assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
    basic = base64.b64encode(b"any:tml-bob").decode()
    for header in (f"Basic {basic}", "Bearer tml-alice"):
        assert httpx.get(server.url, headers={"Authorization": header}).status_code == 200
    assert "Basic" in httpx.get(server.url).headers["www-authenticate"]


@pytest.fixture
def alices(server: Running) -> Iterator[tuple[str, str]]:
    """A model and a checkpoint of alice."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-alice")
    training = service.create_lora_training_client(BASE_MODEL, rank=4).result()
    yield training.model_id, training.save_weights_for_sampler("mine").result().path
    service.close(status="success")


def test_users_are_isolated(server: Running, alices: tuple[str, str]) -> None:
    model_id, path = alices
    session_id = model_id.partition(":")[0]
    run = f"training_runs/{model_id}"
    with as_user(server, "bob") as bob:
        for method, url, body in (
            ("POST", "get_info", {"model_id": model_id}),
            ("POST", "optim_step", {"model_id": model_id, "adam_params": {}}),
            ("POST", "retrieve_future", {"request_id": "1"}),
            ("POST", "cancel_future", {"request_id": "1"}),
            ("POST", "session_heartbeat", {"session_id": session_id}),
            ("POST", f"sessions/{session_id}/finish", {"reason": {"type": "success"}}),
            ("GET", f"sessions/{session_id}", None),
            ("GET", run, None),
            ("GET", f"{run}/checkpoints", None),
            ("POST", "weights_info", {"tinker_path": path}),
            ("POST", "asample", {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {}, "model_path": path}),
            ("DELETE", f"{run}/checkpoints/sampler_weights/mine", None),
            ("PUT", f"{run}/checkpoints/sampler_weights/mine/ttl", {"ttl_seconds": 3600}),
        ):
            assert bob.request(method, url, json=body).status_code == 404, url
        for url in ("sessions", "training_runs", "checkpoints"):
            assert bob.get(url).json().get(url) == []
    with as_user(server, "alice") as alice:
        assert alice.get(run).status_code == 200


def test_public_checkpoints_are_read_only(server: Running, alices: tuple[str, str]) -> None:
    model_id, path = alices
    url = f"training_runs/{model_id}/checkpoints/sampler_weights/mine"
    with as_user(server, "alice") as alice:
        alice.post(f"{url}/publish")
    bob = tinker.ServiceClient(base_url=server.url, api_key="tml-bob")
    sampler = bob.create_sampling_client(model_path=path).result()
    assert sampler.sample(types.ModelInput.from_ints([1]), 1, types.SamplingParams(max_tokens=1)).result().sequences
    bob.close(status="success")
    with as_user(server, "bob") as http:
        assert http.delete(url).status_code == 404
        assert http.post("weights_info", json={"tinker_path": path}).status_code == 200


async def test_no_body_is_read_before_the_key(server: Running) -> None:
    async def receive() -> Any:
        raise AssertionError("a body was read")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def status_of(method: str, header: tuple[bytes, bytes]) -> Any:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "headers": [header]}
        await KeyCheck(app, server.config)(scope, receive, send)
        return sent[0]["status"]

    assert await status_of("POST", (b"x-api-key", b"tml-eve")) == 401
    assert await status_of("GET", (b"transfer-encoding", b"chunked")) == 401
    with pytest.raises(AssertionError, match="a body was read"):
        await status_of("POST", (b"x-api-key", b"tml-bob"))


def test_a_named_user_keeps_all_runs_when_the_key_changes(tmp_path: Path) -> None:
    def runs(*keys: str, used: str) -> list[str]:
        """Create a run; return all runs of its user."""
        with serving(tmp_path / "state", api_keys=tuple(map(SecretStr, keys))) as running:
            running.model(**{"X-API-Key": used})
            with running.client(**{"X-API-Key": used}) as http:
                return [one["training_run_id"] for one in http.get("training_runs").json()["training_runs"]]

    first = runs("tml-old", "tml-bob", used="tml-old")
    second = runs("alice=tml-old", "tml-bob", used="tml-old")
    third = runs("alice=tml-new", "tml-bob", used="tml-new")
    assert len(third) == 3
    assert set(first) < set(second) < set(third)
    assert len(runs("alice=tml-new", "tml-bob", used="tml-bob")) == 1


def test_each_user_has_limits(tmp_path: Path) -> None:
    limits = {"max_sessions_per_user": 2, "max_models_per_user": 1}
    with (
        serving(tmp_path, api_keys=tuple(map(SecretStr, KEYS)), engine=False, **limits) as running,
        as_user(running, "alice") as alice,
        as_user(running, "bob") as bob,
    ):
        sessions = [new_session(alice) for _ in range(2)]
        models = [new_model(*of) for of in ((alice, sessions[0]), (alice, sessions[1]), (bob, new_session(bob)))]
        refused = alice.post("create_session", json={"tags": []})
        alice.post(f"sessions/{sessions[0]}/finish", json={"reason": {"type": "success"}})
        assert new_session(alice)
    assert [one.status_code for one in models] == [200, 400, 200]
    assert_refused(models[1], "your models under training have reached the limit per user, --max-models-per-user=1")
    assert_refused(refused, "you have 2 active sessions, which is the limit per user")
