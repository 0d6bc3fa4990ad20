"""The learner's half of ``http``: a server in a thread of the learner's process.

It listens on loopback unless told otherwise, answers only who shows the token of this run, and streams a version from the slot it
was exported to. When that slot is to be written again, whoever still reads it is cut off. Needs ``corrente[http]``.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable

import uvicorn
from safetensors.torch import save
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from corrente.config import Http
from corrente.errors import SyncError
from corrente.sync import delta, digest
from corrente.sync.base import OfferRequest
from corrente.sync.offers import HttpOffer
from corrente.sync.sender import PackedVersion, SenderSetup

CHUNK_BYTES = 1 << 20
STOP_S = 5.0


class _Served:
    """Bytes on offer, for as long as they stay what they are."""

    def __init__(self, slot: int, body: memoryview) -> None:
        self.slot, self.body = slot, body
        self._lock, self._withdrawn = threading.Lock(), False

    def chunk(self, at: int) -> bytes:
        """A copy of the next bytes; none once withdrawn."""
        with self._lock:
            return b"" if self._withdrawn else bytes(self.body[at : at + CHUNK_BYTES])

    def withdraw(self) -> None:
        """Let nobody read the bytes from now on."""
        with self._lock:
            self._withdrawn = True


class HttpSender:
    """The learner's half. SyncError when the port is not to be had."""

    device = "cpu"

    def __init__(self, section: Http, setup: SenderSetup) -> None:
        self._section, self._layout = section, setup.layout
        self._token = secrets.token_urlsafe(32)
        self.served: dict[str, _Served] = {}
        self._lock = threading.Lock()
        """Guards what is served: the server looks names up while one thread adds to them and another takes them away."""
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

    def offer(
        self, request: OfferRequest, new: PackedVersion, base: PackedVersion | None, *, check: Callable[[], None]
    ) -> HttpOffer:
        body = new.bytes.numpy().data
        if base is not None:
            body = memoryview(save(delta.encode(self._layout, base.bytes, new.bytes, check=check)))
        if new.version != request.live or new.version not in self._digests:
            self._digests = {v: d for v, d in self._digests.items() if v == request.live}
            self._digests[new.version] = digest.of(self._layout, new.bytes, threads=1, check=check)
        name = secrets.token_hex(8)
        with self._lock:
            self.served[name] = _Served(new.slot, body)
        host, port = self._socket.getsockname()[:2]
        return HttpOffer(
            version=request.version,
            slot=request.slot,
            nbytes=body.nbytes,
            base=base.version if base else None,
            url=f"http://[{host}]:{port}/weights/{name}" if ":" in host else f"http://{host}:{port}/weights/{name}",
            token=self._token,
            digest=self._digests[new.version],
            deadline_s=self._section.deadline_s,
        )

    def release(self, slot: int) -> None:
        with self._lock:
            gone = [name for name, served in self.served.items() if served.slot == slot]
            for name in gone:
                self.served.pop(name).withdraw()

    def close(self) -> None:
        """Stop serving; the port is free when this returns."""
        with self._lock:
            for served in self.served.values():
                served.withdraw()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(STOP_S)
        self._socket.close()

    async def _serve(self, request: Request) -> Response:
        """One version to whoever shows the token."""
        shown = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(shown, f"Bearer {self._token}".encode()):
            return Response("a token of this run is needed", status_code=401)
        served = self.served.get(request.path_params["name"])
        if served is None:
            return Response("no such version, or no longer", status_code=404)
        headers = {"content-length": str(served.body.nbytes)}
        return StreamingResponse(_stream(served), media_type="application/octet-stream", headers=headers)


async def _stream(served: _Served) -> AsyncIterator[bytes]:
    at = 0
    while at < served.body.nbytes:
        chunk = served.chunk(at)
        if not chunk:
            raise SyncError("withdrawn: the learner writes the next version")
        yield chunk
        at += len(chunk)
