from pathlib import Path
from typing import Any

import httpx
import pytest
from tx_kit.servers import Running, assert_refused, new_model, new_session, result_of

SERVER_SETTINGS = {"train_all": False, "root_path": "/behind"}


@pytest.mark.parametrize("more", [{"ttl_seconds": 3600}, {"user_metadata": {"a": "b"}}])
def test_an_unnamed_sampler_has_no_metadata(server: Running, http: httpx.Client, more: dict[str, Any]) -> None:
    body = {"model_id": server.model(), "sampling_session_seq_id": 0, **more}
    assert_refused(http.post("save_weights_for_sampler", json=body), "need a named sampler")


def test_access_tokens_are_refused(server: Running, http: httpx.Client) -> None:
    model_id = server.model()
    path = result_of(http, http.post("save_weights", json={"model_id": model_id, "path": "a"}))["path"]
    token = {"weights_access_token": "t"}
    copy = {"source_path": path, "destination_project_id": "p", **token}
    load = {"session_id": model_id.partition(":")[0], "model_seq_id": 1, "path": path, "optimizer": False, **token}
    for url, body in (("copy_weights", copy), ("load_weights", load)):
        assert_refused(http.post(url, json=body), "weights_access_token")


def test_rank_0_can_be_switched_off(http: httpx.Client) -> None:
    assert_refused(new_model(http, new_session(http), rank=0), "lora_config.rank=0")


def test_addresses_include_the_proxys_prefix(server: Running, http: httpx.Client) -> None:
    body = {"model_id": server.model(), "path": "out"}
    run = result_of(http, http.post("save_weights_external", json=body))["path"].split("/")[2]
    urls = http.get(f"training_runs/{run}/checkpoints/external_weights/out/external_weights_urls").json()["urls"]
    assert all("/behind/api/v1/downloads/" in url for url in urls.values())
    assert urls


def test_clients_find_the_tokenizer_where_the_model_is(server: Running, tmp_path: Path) -> None:
    config = server.config.model_copy(update={"base_model": "org/model", "served_model_name": "mine"})
    assert config.tokenizer == "org/model"
    assert config.model_copy(update={"base_model": str(tmp_path)}).tokenizer == str(tmp_path)
    (tmp_path / "a:b").mkdir()
    assert config.model_copy(update={"base_model": str(tmp_path / "a:b")}).tokenizer is None
