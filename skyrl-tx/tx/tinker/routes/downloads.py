"""Create download addresses and serve the files."""

import time
from datetime import UTC, datetime
from email.utils import format_datetime
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse, StreamingResponse

from tx.tinker.db_models import CheckpointKind
from tx.tinker.refusal import not_found, refuse
from tx.tinker.routes.runs import CHECKPOINT, path_of
from tx.tinker.server.downloads import ARCHIVE, Download, files_of, sign, tar_parts, verify
from tx.tinker.server.replies import reply
from tx.tinker.server.service import Call, Caller, Service
from tx.tinker.store import queries
from tx.tinker.store.checkpoint_files import checkpoint_folder, parse_path
from tx.tinker.wire import responses as responses

router = APIRouter()


async def _folder(call: Call, path: str) -> Path:
    """Return the folder of a checkpoint that the user may read."""
    await call.read(lambda db, owner: queries.find_checkpoint(db, path, owner))
    folder = checkpoint_folder(call.service.config, path)
    if not folder.is_dir():
        not_found(f"the files of {path} are gone")
    return folder


def _address(call: Call, path: str, file: str, expires: int) -> str:
    token = sign(Download(path, file, expires), call.service.url_key)
    return str(call.http.url_for("download", token=token, name=Path(file).name))


def _expiry(service: Service) -> int:
    return int(time.time() + service.config.url_lifetime_sec)


@router.get(CHECKPOINT + "/external_weights_urls")
async def external_weights_urls(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """Return a download address for each file of external weights."""
    path = path_of(run_id, checkpoint_id)
    if parse_path(path).kind is not CheckpointKind.EXTERNAL:
        refuse(f"{path} has no external weights; create them with save_weights_external")
    folder = await _folder(call, path)
    expires = _expiry(call.service)
    files = [file.relative_to(folder).as_posix() for file in await call.service.compute(partial(files_of, folder))]
    urls = {file: _address(call, path, file, expires) for file in files}
    return reply(responses.DownloadUrls(urls=urls, expires=datetime.fromtimestamp(expires, UTC)))


@router.get(CHECKPOINT + "/archive")
async def archive(call: Caller, run_id: str, checkpoint_id: str) -> Response:
    """Redirect to a tar archive of all files. Older clients read `Location` and `Expires`."""
    path = path_of(run_id, checkpoint_id)
    await _folder(call, path)
    expires = _expiry(call.service)
    headers = {
        "Location": _address(call, path, ARCHIVE, expires),
        "Expires": format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True),
    }
    return Response(status_code=302, headers=headers)


@router.get("/downloads/{token}/{name}")
async def download(request: Request, token: str, name: str) -> Response:
    """Serve a file. The signed address is the only access control."""
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
