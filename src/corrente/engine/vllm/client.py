"""HTTP to one vLLM server: its failures, and which calls are tried again.

4xx      the server has read the request and refuses it: GenerationError at once, with its message.
5xx      and lost connections: tried again, waiting longer each time, until ``retries`` or ``deadline_s`` are used up.
death    of a launched server: WorkerDied with its last output, in every call that waits.

The client opens as many connections as there are calls; it has no limit at which calls would queue.
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

FIRST_RETRY_WAIT_S = 0.1
LONGEST_RETRY_WAIT_S = 5.0
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
"""The longest wait, in seconds, for the answer to a call that is not a generation."""


class ServerError(Exception):
    """The server failed or could not be reached; the call may be retried."""


def _never_dead() -> WorkerDied | None:
    return None


class Client:
    """The connection to one server. ``death`` returns the error of a server that is known to be dead, else None."""

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        verify: bool | str = True,
        retries: int = 5,
        deadline_s: float = 600.0,
        death: Callable[[], WorkerDied | None] = _never_dead,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._retries, self._deadline_s, self._death = retries, deadline_s, death
        self.http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            verify=tls.ssl_context(verify, key="engine.verify"),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
            transport=transport,
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self.http.aclose()

    async def get(self, path: str) -> Any:
        """Return the JSON at ``path``, None for another content type; one attempt. ServerError, or GenerationError for a 4xx."""
        return await self._request_once("GET", path, None)

    async def post(self, path: str, body: Any = None, *, timeout_s: float = READ_TIMEOUT_S) -> Any:
        """Return the JSON answer to ``body``; one attempt, which fails after ``timeout_s`` without data. Errors as ``get``."""
        return await self._request_once(
            "POST", path, body, httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S, pool=None)
        )

    async def wait_for_answer(self, path: str, body: Any) -> None:
        """Return once the server has answered anything or cannot be reached. The caller sets the time limit."""
        try:
            await self._request_once("POST", path, body, httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, pool=None))
        except (ServerError, GenerationError):
            return

    async def stream(self, path: str, body: Any) -> AsyncGenerator[dict[str, Any]]:
        """Yield the events of a streamed answer; one attempt. Leaving the loop closes the connection, which aborts the request.

        Tokens may take long (a queue, a pause), so only the caller's deadline bounds the wait between events. ServerError when
        the connection is lost; GenerationError when the server refuses the request.
        """
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S, pool=None)
        try:
            async with self.http.stream("POST", path, json=body, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    raise _error_of_response(answer)
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield _parse_event(line[6:])
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}: {_describe_error(error)}") from error
        raise ServerError(f"{self.url}: the answer ended in the middle")

    async def call_with_retries(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return what ``attempt`` returns, and call it again after a ServerError.

        GenerationError when retries or time are used up; WorkerDied as soon as the server is known to be dead.
        """
        wait_s, failure = FIRST_RETRY_WAIT_S, ServerError("nothing was tried")
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
                    wait_s = min(2 * wait_s, LONGEST_RETRY_WAIT_S)
            raise GenerationError(f"{failure}; gave up after {self._retries + 1} attempts (engine.retries)")
        raise GenerationError(
            f"{self.url}: no answer within {self._deadline_s:g} s (engine.request_deadline_s); {failure}"
        )

    async def _request_once(self, method: str, path: str, body: Any, timeout: httpx.Timeout | None = None) -> Any:
        more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        try:
            answer = await self.http.request(method, path, json=body, **more)
        except httpx.TransportError as error:
            raise ServerError(f"{self.url}: {_describe_error(error)}") from error
        if answer.status_code >= 400:
            raise _error_of_response(answer)
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        return answer.json() if is_json and answer.content else None


@asynccontextmanager
async def open_client(client: Client) -> AsyncGenerator[Client]:
    try:
        yield client
    finally:
        with anyio.CancelScope(shield=True):
            await client.aclose()


def _parse_event(data: str) -> dict[str, Any]:
    event = msgspec.json.decode(data)
    if "error" in event:
        code = event["error"].get("code", 500) if isinstance(event["error"], dict) else 500
        raise GenerationError(_error_message(event)) if 400 <= code < 500 else ServerError(_error_message(event))
    return event


def _error_of_response(answer: httpx.Response) -> Exception:
    try:
        message = _error_message(answer.json())
    except ValueError:
        message = answer.text.strip()
    text = f"{answer.request.url.path}: {answer.status_code} {message or answer.reason_phrase}"
    return GenerationError(text) if answer.status_code < 500 else ServerError(text)


def _error_message(body: Any) -> str:
    """The message of an error, in any of the forms that vLLM and FastAPI use."""
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    if isinstance(error, dict):
        return str(error.get("message", error))
    return str(error)


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
