"""Training runs and their checkpoints."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Response
from sqlmodel import Session

from tx.tinker.db_models import CheckpointKind
from tx.tinker.refusal import refuse
from tx.tinker.server.replies import reply
from tx.tinker.server.service import Call, Caller, Limit, Offset
from tx.tinker.store import catalog, queries
from tx.tinker.store.checkpoint_files import SCHEME, delete_aside, parse_path
from tx.tinker.store.copying import check_copy, copy_files, record_copy, target_path
from tx.tinker.submission.training import check_no_token
from tx.tinker.wire import listings
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as responses

router = APIRouter()

RUNS = "/training_runs"
CHECKPOINT = RUNS + "/{run_id}/checkpoints/{checkpoint_id:path}"
CLIENT_VERSION = "x-stainless-package-version"
FIRST_WITH_EXTERNAL = (0, 28)


def readable_kinds(headers: Mapping[str, str]) -> tuple[CheckpointKind, ...]:
    """Return the checkpoint kinds that a client can parse. Older clients reject a whole list for one unknown kind."""
    version = headers.get(CLIENT_VERSION, "").split(".")[:2]
    if all(part.isdecimal() for part in version) and tuple(map(int, version)) < FIRST_WITH_EXTERNAL:
        return CheckpointKind.TRAINING, CheckpointKind.SAMPLER
    return tuple(CheckpointKind)


@router.get(RUNS)
async def get_training_runs(
    call: Caller, limit: Limit = 20, offset: Offset = 0, project_id: wire.Text | None = None
) -> Response:
    """List training runs, most recently used first."""
    page = {"limit": limit, "offset": offset}
    return reply(await call.read(lambda db, owner: catalog.list_training_runs(db, owner, project_id, **page)))


@router.get(RUNS + "/{run_id}")
async def get_training_run(call: Caller, run_id: str) -> Response:
    """Describe a training run."""
    call.add_notes(model=run_id)

    def query(db: Session, owner: str) -> listings.TrainingRun:
        model = queries.find_model(db, run_id, owner)
        return catalog.training_run(model, owner, catalog.checkpoints_of(db, [run_id]))

    return reply(await call.read(query))


@router.get(RUNS + "/{run_id}/checkpoints")
async def get_run_checkpoints(call: Caller, run_id: str) -> Response:
    """List the checkpoints of a run, newest first."""
    call.add_notes(model=run_id)

    def query(db: Session, owner: str) -> listings.CheckpointList:
        queries.find_model(db, run_id, owner)
        kinds = readable_kinds(call.http.headers)
        found = [checkpoint for checkpoint in catalog.checkpoints_of(db, [run_id]) if checkpoint.kind in kinds]
        return listings.CheckpointList(checkpoints=[catalog.checkpoint_info(checkpoint) for checkpoint in found])

    return reply(await call.read(query))


@router.get("/checkpoints")
async def get_checkpoints(call: Caller, limit: Limit = 100, offset: Offset = 0) -> Response:
    """List the checkpoints of all runs, newest first."""
    kinds = readable_kinds(call.http.headers)
    page = {"limit": limit, "offset": offset}
    return reply(await call.read(lambda db, owner: catalog.list_checkpoints(db, owner, kinds, **page)))


@router.post("/weights_info")
async def weights_info(call: Caller, body: wire.WeightsInfoRequest) -> Response:
    """Describe the weights of a checkpoint."""
    found = await call.read(lambda db, owner: queries.find_checkpoint(db, body.tinker_path, owner))
    parts = {name: found.lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
    rank = int(found.lora["rank"])
    # Always set a rank: older clients create the model they load into with it.
    return reply(responses.WeightsInfo(base_model=found.base_model, is_lora=rank > 0, lora_rank=rank, **parts))


def path_of(run_id: str, checkpoint_id: str) -> str:
    """Return the path of the checkpoint in a URL."""
    if "/" not in checkpoint_id:
        refuse(
            f"{checkpoint_id[:300]!r} lacks the kind of the checkpoint; "
            f"use weights/<name>, sampler_weights/<name> or external_weights/<name>"
        )
    return str(parse_path(f"{SCHEME}{run_id}/{checkpoint_id}"))


@router.post(CHECKPOINT + "/publish")
async def publish(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """Make a checkpoint readable by all users of this server."""
    return await _set_public(call, path_of(run_id, checkpoint_id), is_public=True)


@router.delete(CHECKPOINT + "/publish")
async def unpublish(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """Make a checkpoint private again."""
    return await _set_public(call, path_of(run_id, checkpoint_id), is_public=False)


async def _set_public(call: Call, path: str, *, is_public: bool) -> Response:
    def change(db: Session, owner: str) -> None:
        queries.own_checkpoint(db, path, owner).is_public = is_public

    await call.write(change)
    return Response(status_code=204)


@router.put(CHECKPOINT + "/ttl")
async def set_ttl(call: Caller, run_id: str, checkpoint_id: str, body: wire.SetTtlRequest) -> Response:
    """Set or remove the expiry of a checkpoint."""
    path = path_of(run_id, checkpoint_id)

    def change(db: Session, owner: str) -> None:
        queries.own_checkpoint(db, path, owner).expires_at = queries.expiry(body.ttl_seconds)

    await call.write(change)
    return Response(status_code=204)


@router.delete(CHECKPOINT)
async def delete_checkpoint(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """Delete a checkpoint. Its name is free immediately."""
    path = path_of(run_id, checkpoint_id)

    def change(db: Session, owner: str) -> Path | None:
        return queries.drop_checkpoint(db, queries.own_checkpoint(db, path, owner), call.service.config)

    await call.service.compute(partial(delete_aside, await call.write(change)))
    return Response(status_code=204)


@router.post("/copy_weights")
async def copy_weights(call: Caller, body: wire.CopyWeightsRequest) -> Response:
    """Copy a checkpoint into a new run."""
    check_no_token(body.weights_access_token)
    config = call.service.config
    target = target_path(call.owner, body, call.http.headers.get("x-idempotency-key"))
    if await call.read(lambda db, owner: check_copy(db, owner, body, target)):
        complete = await call.service.compute(partial(copy_files, config, body.source_path, target))
        try:
            await call.write(lambda db, owner: record_copy(db, owner, config, body, target, complete))
        finally:
            await call.service.compute(partial(shutil.rmtree, complete, ignore_errors=True))
    return reply(responses.WeightsCopied(tinker_path=target))
