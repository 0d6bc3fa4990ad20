"""HTTP to one vLLM server: its failures, and which calls are tried again.

4xx      the server has read the request and refuses it: GenerationError at once, with its message.
5xx      and lost connections: tried again, waiting longer each time, until ``retries`` or ``deadline_s`` are used up.
death    of a launched server: WorkerDied with its last output, in every call that waits.

The client opens as many connections as there are calls; nothing queues behind a limit of its own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import httpx2 as httpx
import msgspec

from corrente.common import tls
from corrente.errors import GenerationError, WorkerDied

T = TypeVar("T")

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
CONNECT_S = 10.0
SILENCE_S = 60.0
"""Longest wait for the answer of a call that is not a generation."""


class ServerError(Exception):
    """The server failed, or could not be reached: what was asked may be tried again."""


def _alive() -> WorkerDied | None:
    return None


class Client:
    """One server. ``death`` says whether it is known to be dead, and how."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        verify: bool | str = True,
        retries: int = 5,
        deadline_s: float = 600.0,
        death: Callable[[], WorkerDied | None] = _alive,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._retries, self._deadline_s, self._death = retries, deadline_s, death
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            verify=tls.context(verify, key="engine.verify"),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(SILENCE_S, connect=CONNECT_S, pool=None),
            transport=transport,
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._http.aclose()

    async def get(self, path: str) -> Any:
        """The JSON at ``path``, None for anything else; one attempt. ServerError, or GenerationError for a 4xx."""
        return await self._once("GET", path, None)

    async def post(self, path: str, body: Any = None, *, silence_s: float = SILENCE_S) -> Any:
        """The JSON answer to ``body``; one attempt, no answer for longer than ``silence_s`` is a failure. Errors as ``get``."""
        return await self._once("POST", path, body, httpx.Timeout(silence_s, connect=CONNECT_S, pool=None))

    async def answered(self, path: str, body: Any) -> None:
        """Return once the server has answered, whatever it says, or cannot be reached, which others judge. How long it may be
        silent is the caller's to say."""
        try:
            await self._once("POST", path, body, httpx.Timeout(None, connect=CONNECT_S, pool=None))
        except (ServerError, GenerationError):
            return

    async def stream(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any]]:
        """The events of an answer that comes in pieces, as they come; one attempt. However it is left, the server is told.

        Tokens may be long in coming (a queue, a pause): the wait between pieces is bounded by the caller's deadline alone.
        """
        timeout = httpx.Timeout(None, connect=CONNECT_S, pool=None)
        try:
            async with self._http.stream("POST", path, json=body, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise _refusal(answer)
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield _event(line[6:])
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}: {_words(error)}") from error
        raise ServerError(f"{self.url}: the answer ended in the middle")

    async def insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt`` returns, trying again after a ServerError.

        GenerationError when all was in vain; WorkerDied as soon as the server is known to be dead.
        """
        wait_s, failure = FIRST_WAIT_S, ServerError("nothing was tried")
        with anyio.move_on_after(self._deadline_s):
            for left in range(self._retries, -1, -1):
                try:
                    return await attempt()
                except ServerError as error:
                    failure = error
                if (death := self._death()) is not None:
                    raise death
                if left:
                    await anyio.sleep(wait_s)
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
            raise GenerationError(f"{failure}; gave up after {self._retries + 1} attempts (engine.retries)")
        raise GenerationError(
            f"{self.url}: no answer within {self._deadline_s:g} s (engine.request_deadline_s); {failure}"
        )

    async def _once(self, method: str, path: str, body: Any, timeout: httpx.Timeout | None = None) -> Any:
        more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        try:
            answer = await self._http.request(method, path, json=body, **more)
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}: {_words(error)}") from error
        if answer.status_code >= 400:
            raise _refusal(answer)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json and answer.content else None


@asynccontextmanager
async def opened(client: Client) -> AsyncGenerator[Client]:
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.aclose()


def _event(data: str) -> dict[str, Any]:
    event = msgspec.json.decode(data)
    if "error" in event:
        code = event["error"].get("code", 500) if isinstance(event["error"], dict) else 500
        raise GenerationError(_said(event)) if 400 <= code < 500 else ServerError(_said(event))
    return event


def _refusal(answer: httpx.Response) -> Exception:
    try:
        said = _said(answer.json())
    except ValueError:
        said = answer.text.strip()
    words = f"{answer.request.url.path}: {answer.status_code} {said or answer.reason_phrase}"
    return GenerationError(words) if answer.status_code < 500 else ServerError(words)


def _said(body: Any) -> str:
    """The words of an error, in any of the shapes vLLM and FastAPI give them."""
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
