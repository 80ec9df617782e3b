"""Addresses of files, and the files."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request, Response
from sqlmodel import Session
from starlette.responses import FileResponse, StreamingResponse

from tx.tinker import store
from tx.tinker.checkpoint_files import checkpoint_folder, parse_path
from tx.tinker.db_models import CheckpointKind
from tx.tinker.downloads import ARCHIVE, Download, files_of, sign, tar_parts, verify
from tx.tinker.refusal import not_found, refuse
from tx.tinker.replies import reply
from tx.tinker.routes.runs import ONE, path_of
from tx.tinker.service import Call, Caller, Service
from tx.tinker.wire import responses as answers

router = APIRouter()


async def _folder(call: Call, path: str) -> Path:
    """Of a checkpoint that the user may read."""

    def check(db: Session, owner: str) -> None:
        store.find_checkpoint(db, path, owner)

    await call.read(check)
    folder = checkpoint_folder(call.service.config, path)
    if not folder.is_dir():
        not_found(f"the files of {path} are gone")
    return folder


def _address(call: Call, path: str, file: str, expires: int) -> str:
    token = sign(Download(path, file, expires), call.service.url_key)
    return str(call.http.url_for("download", token=token, name=Path(file).name))


def _expires(service: Service) -> int:
    return int(time.time() + service.config.url_lifetime_sec)


@router.get(ONE + "/external_weights_urls")
async def external_weights_urls(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """An address for each file of external weights."""
    path = path_of(run_id, checkpoint_id)
    if parse_path(path).kind is not CheckpointKind.EXTERNAL:
        refuse(f"{path} has no external weights; save_weights_external makes them")
    folder = await _folder(call, path)
    expires = _expires(call.service)
    files = [file.relative_to(folder).as_posix() for file in await call.service.compute(partial(files_of, folder))]
    urls = {file: _address(call, path, file, expires) for file in files}
    return reply(answers.DownloadUrls(urls=urls, expires=datetime.fromtimestamp(expires, UTC)))


@router.get(ONE + "/archive")
async def archive(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """A redirection to all files in a tar; older clients read where to, and until when."""
    path = path_of(run_id, checkpoint_id)
    await _folder(call, path)
    expires = _expires(call.service)
    headers = {
        "Location": _address(call, path, ARCHIVE, expires),
        "Expires": format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True),
    }
    return Response(status_code=302, headers=headers)


@router.get("/downloads/{token}/{name}")
async def download(request: Request, token: str, name: str) -> Response:
    """A file. The address is all that it needs."""
    service: Service = request.app.state.service
    allowed = verify(token, service.url_key)
    folder = checkpoint_folder(service.config, allowed.path)
    if allowed.file == ARCHIVE:
        if not folder.is_dir():
            not_found(f"the files of {allowed.path} are gone")
        return StreamingResponse(tar_parts(folder), media_type="application/x-tar")
    file = folder / allowed.file
    if not file.is_file():
        not_found(f"{allowed.file} of {allowed.path} is gone")
    return FileResponse(file, media_type="application/octet-stream", filename=file.name)
