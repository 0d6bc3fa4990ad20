"""A server that speaks as much of vLLM's API as the client uses, with the faults that a test asks for. No model: token n is n."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
from anyio.abc import SocketStream
from anyio.streams.tls import TLSListener


class Asked(NamedTuple):
    path: str
    headers: Mapping[str, str]
    body: Any


class Say(NamedTuple):
    """An answer: JSON, or ``events`` one by one. ``hang_up``: the connection is lost in the middle."""

    status: int = 200
    body: Any = None
    events: tuple[Any, ...] = ()
    hang_up: bool = False


Handler = Callable[[Asked], Say]
DROP = Say(hang_up=True)


class Fake:
    """Answers what ``handler`` says, and remembers what it was asked; ``most`` is how many calls were open at once."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.asked: list[Asked] = []
        self.open = self.most = 0
        self.gate: anyio.Event | None = None
        """While it is not set, streams stop after their first event."""
        self.awake: anyio.Event | None = None
        """While it is not set, nothing is answered."""
        self.url = ""

    async def serve(self, stream: Any) -> None:
        try:
            async with stream:
                await self._answer(stream)
        except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError):
            return

    async def _answer(self, stream: SocketStream) -> None:
        asked = await _read(stream)
        self.asked.append(asked)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.awake is not None:
                await self.awake.wait()
            say = self.handler(asked)
            if not say.events:
                if say.hang_up:
                    return
                body = b"" if say.body is None else json.dumps(say.body).encode()
                kind = f"content-length: {len(body)}\r\ncontent-type: application/json"
                head = f"HTTP/1.1 {say.status} X\r\n{kind}\r\nconnection: close\r\n\r\n"
                await stream.send(head.encode() + body)
                return
            await stream.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
            for at, event in enumerate((*say.events, *(() if say.hang_up else ("[DONE]",)))):
                text = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n"
                await stream.send(f"{len(text):x}\r\n{text}\r\n".encode())
                if at == 0 and self.gate is not None:
                    await self.gate.wait()
            if not say.hang_up:
                await stream.send(b"0\r\n\r\n")
        finally:
            self.open -= 1


async def _read(stream: SocketStream) -> Asked:
    data = b""
    while b"\r\n\r\n" not in data:
        data += await stream.receive()
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers.get("content-length", 0)):
        body += await stream.receive()
    return Asked(first.split()[1], headers, json.loads(body) if body else None)


@asynccontextmanager
async def serving(handler: Handler, *, tls: ssl.SSLContext | None = None) -> AsyncGenerator[Fake]:
    fake = Fake(handler)
    listener: Any = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    fake.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    if tls is not None:
        listener = TLSListener(listener, tls, standard_compatible=False)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, fake.serve)
        yield fake
        tasks.cancel_scope.cancel()


def piece(
    tokens: list[int], *, versions: list[tuple[str, int, int]], finish: str | None = None, stop: Any = None
) -> dict[str, Any]:
    """One streamed event of /inference/v1/generate, as vLLM 0.32 writes it."""
    return {
        "request_id": "x",
        "usage": None,
        "output_mode": "tokens",
        "choices": [
            {
                "index": 0,
                "finish_reason": finish,
                "stop_reason": stop,
                "token_ids": tokens,
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in versions],
                "logprobs": {
                    "content": [{"token_id": t, "logprob": -t / 100, "rank": 1, "top_logprobs": []} for t in tokens]
                },
            }
        ],
    }


def refusal(code: int, words: str) -> Say:
    """As vLLM says no."""
    return Say(status=code, body={"error": {"message": words, "type": "BadRequestError", "param": None, "code": code}})
