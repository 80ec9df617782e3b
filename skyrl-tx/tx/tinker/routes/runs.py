"""Training runs and their checkpoints."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Response
from sqlmodel import Session

from tx.tinker import catalog, store
from tx.tinker.checkpoint_files import SCHEME, delete_aside, parse_path
from tx.tinker.copying import check_copy, copy_files, record_copy, target_path
from tx.tinker.refusal import refuse
from tx.tinker.replies import reply
from tx.tinker.routes.older_clients import readable_kinds
from tx.tinker.routes.paging import Limit, Offset
from tx.tinker.service import Call, Caller
from tx.tinker.submission import check_no_token
from tx.tinker.wire import listings
from tx.tinker.wire import requests as wire
from tx.tinker.wire import responses as answers

router = APIRouter()

RUNS = "/training_runs"
ONE = RUNS + "/{run_id}/checkpoints/{checkpoint_id:path}"


@router.get(RUNS)
async def get_training_runs(
    call: Caller, limit: Limit = 20, offset: Offset = 0, project_id: wire.Text | None = None
) -> Response:
    """The one used last first."""

    def ask(db: Session, owner: str) -> listings.TrainingRunList:
        return catalog.list_training_runs(db, owner, project_id, limit=limit, offset=offset)

    return reply(await call.read(ask))


@router.get(RUNS + "/{run_id}")
async def get_training_run(call: Caller, run_id: str) -> Response:
    """One of them."""
    call.note(model=run_id)

    def ask(db: Session, owner: str) -> listings.TrainingRun:
        model = store.find_model(db, run_id, owner)
        return catalog.training_run(model, owner, catalog.checkpoints_of(db, [run_id]))

    return reply(await call.read(ask))


@router.get(RUNS + "/{run_id}/checkpoints")
async def get_run_checkpoints(call: Caller, run_id: str) -> Response:
    """Of one run, the newest first."""
    call.note(model=run_id)

    def ask(db: Session, owner: str) -> listings.CheckpointList:
        store.find_model(db, run_id, owner)
        kinds = readable_kinds(call.http.headers)
        found = [one for one in catalog.checkpoints_of(db, [run_id]) if one.kind in kinds]
        return listings.CheckpointList(checkpoints=[catalog.checkpoint_info(one) for one in found])

    return reply(await call.read(ask))


@router.get("/checkpoints")
async def get_checkpoints(call: Caller, limit: Limit = 100, offset: Offset = 0) -> Response:
    """Of all runs, the newest first."""
    kinds = readable_kinds(call.http.headers)

    def ask(db: Session, owner: str) -> listings.CheckpointList:
        return catalog.list_checkpoints(db, owner, kinds, limit=limit, offset=offset)

    return reply(await call.read(ask))


@router.post("/weights_info")
async def weights_info(call: Caller, asked: wire.WeightsInfoRequest) -> Response:
    """What a checkpoint is of."""

    def ask(db: Session, owner: str) -> answers.WeightsDescribed:
        lora = (found := store.find_checkpoint(db, asked.tinker_path, owner)).lora
        parts = {name: lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
        rank = int(lora["rank"])
        # A rank even where there is no adapter: with this one, older clients make the model that they load into.
        return answers.WeightsDescribed(base_model=found.base_model, is_lora=rank > 0, lora_rank=rank, **parts)

    return reply(await call.read(ask))


def path_of(run_id: str, checkpoint_id: str) -> str:
    """The path of a checkpoint that an address names."""
    if "/" not in checkpoint_id:
        refuse(
            f"{checkpoint_id[:300]!r} does not say what kind of checkpoint it is; "
            f"give weights/<name>, sampler_weights/<name> or external_weights/<name>"
        )
    return str(parse_path(f"{SCHEME}{run_id}/{checkpoint_id}"))


@router.post(ONE + "/publish")
async def publish(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """All users of this server may read it from now on."""
    return await _set_public(call, path_of(run_id, checkpoint_id), is_public=True)


@router.delete(ONE + "/publish")
async def unpublish(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """And now no more."""
    return await _set_public(call, path_of(run_id, checkpoint_id), is_public=False)


async def _set_public(call: Call, path: str, *, is_public: bool) -> Response:
    def change(db: Session, owner: str) -> None:
        store.own_checkpoint(db, path, owner).is_public = is_public

    await call.write(change)
    return Response(status_code=204)


@router.put(ONE + "/ttl")
async def set_ttl(call: Caller, run_id: str, checkpoint_id: str, asked: wire.SetTtlRequest) -> Response:
    """How long it stays, from now on."""
    path = path_of(run_id, checkpoint_id)

    def change(db: Session, owner: str) -> None:
        store.own_checkpoint(db, path, owner).expires_at = store.expiry(asked.ttl_seconds)

    await call.write(change)
    return Response(status_code=204)


@router.delete(ONE)
async def delete_checkpoint(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """Another may have its name at once."""
    path = path_of(run_id, checkpoint_id)

    def change(db: Session, owner: str) -> Path | None:
        return store.drop_checkpoint(db, store.own_checkpoint(db, path, owner), call.service.config)

    await call.service.compute(partial(delete_aside, await call.write(change)))
    return Response(status_code=204)


@router.post("/copy_weights")
async def copy_weights(call: Caller, asked: wire.CopyWeightsRequest) -> Response:
    """A checkpoint into a run of its own."""
    check_no_token(asked.weights_access_token)
    config = call.service.config
    target = target_path(call.owner, asked, call.http.headers.get("x-idempotency-key"))
    if await call.read(lambda db, owner: check_copy(db, owner, asked, target)):
        complete = await call.service.compute(partial(copy_files, config, asked.source_path, target))
        try:
            await call.write(lambda db, owner: record_copy(db, owner, config, asked, target, complete))
        finally:
            await call.service.compute(partial(shutil.rmtree, complete, ignore_errors=True))
    return reply(answers.WeightsCopied(tinker_path=target))
