"""The learner's half of ``http``: a server in a thread of the learner's process.

It listens on loopback unless told otherwise, answers only who shows the token of this run, and streams a version from the slot it
was packed into. When that slot is to be written again, whoever still reads it is cut off. Needs ``corrente[http]``.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import uvicorn
from safetensors.torch import save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from corrente.config import Http
from corrente.errors import SyncError
from corrente.sync import delta, digest
from corrente.sync.base import Order, OverHttp
from corrente.sync.layout import Layout
from corrente.sync.outbox import Packed

CHUNK_BYTES = 1 << 20
STOP_S = 5.0


class _Parcel:
    """Bytes on offer, for as long as they stay what they are."""

    def __init__(self, slot: int, body: memoryview) -> None:
        self.slot, self.body = slot, body
        self._lock, self._withdrawn = threading.Lock(), False

    def chunk(self, at: int) -> bytes:
        """A copy of the next bytes; none once withdrawn."""
        with self._lock:
            return b"" if self._withdrawn else bytes(self.body[at : at + CHUNK_BYTES])

    def withdraw(self) -> None:
        """From now on nobody reads the bytes."""
        with self._lock:
            self._withdrawn = True


class HttpOutlet:
    """The learner's half. SyncError when the port is not to be had."""

    device = "cpu"

    def __init__(self, section: Http, *, layout: Layout, folder: Path) -> None:
        self._section, self._layout = section, layout
        self._token = secrets.token_urlsafe(32)
        self._parcels: dict[str, _Parcel] = {}
        self._digests: dict[int, str] = {}
        try:
            self._socket = socket.create_server((section.host, section.port))
        except OSError as error:
            where = f"sync.host = {section.host!r}, sync.port = {section.port}"
            raise SyncError(f"{where}: the learner cannot listen there: {error.strerror}") from error
        app = Starlette(routes=[Route("/weights/{name}", self._serve)])
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, log_level="critical", access_log=False, lifespan="off", ws="none")
        )
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="weights over http", daemon=True
        )
        self._thread.start()

    def offer(self, order: Order, new: Packed, base: Packed | None) -> OverHttp:
        body = new.bytes.numpy().data
        if base is not None:
            body = memoryview(save(delta.encode(self._layout, base.bytes, new.bytes)))
        if new.version != order.live or new.version not in self._digests:
            self._digests = {v: d for v, d in self._digests.items() if v == order.live}
            self._digests[new.version] = digest.of(self._layout, new.bytes)
        name = secrets.token_hex(8)
        self._parcels[name] = _Parcel(new.slot, body)
        host, port = self._socket.getsockname()[:2]
        return OverHttp(
            version=order.version,
            slot=order.slot,
            nbytes=body.nbytes,
            base=base.version if base else None,
            url=f"http://[{host}]:{port}/weights/{name}" if ":" in host else f"http://{host}:{port}/weights/{name}",
            token=self._token,
            digest=self._digests[new.version],
            deadline_s=self._section.deadline_s,
        )

    def quiet(self, slot: int) -> None:
        for name, parcel in list(self._parcels.items()):
            if parcel.slot == slot:
                parcel.withdraw()
                del self._parcels[name]

    def close(self) -> None:
        """Stop serving; the port is free when this returns."""
        for parcel in self._parcels.values():
            parcel.withdraw()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(STOP_S)
        self._socket.close()

    async def _serve(self, request: Request) -> Response:
        """One version to whoever shows the token."""
        shown = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(shown, f"Bearer {self._token}".encode()):
            return Response("a token of this run is needed", status_code=401)
        parcel = self._parcels.get(request.path_params["name"])
        if parcel is None:
            return Response("no such version, or no longer", status_code=404)
        headers = {"content-length": str(parcel.body.nbytes)}
        return StreamingResponse(_stream(parcel), media_type="application/octet-stream", headers=headers)


async def _stream(parcel: _Parcel) -> AsyncIterator[bytes]:
    at = 0
    while at < parcel.body.nbytes:
        chunk = parcel.chunk(at)
        if not chunk:
            raise SyncError("withdrawn: the learner writes the next version")
        yield chunk
        at += len(chunk)
