"""Calls over a socket: numbered, overtaking, cancelled, and ended together with who answers them."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from corrente.common import rpc
from corrente.common.rpc_client import RpcClient
from corrente.common.serialization import decode
from corrente.errors import PipelineError, WorkerDied


class Question(msgspec.Struct, frozen=True, tag=True):
    text: str


class Peer:
    """The other end of a client's socket, driven by a test."""

    def __init__(self, link: socket.socket) -> None:
        self._link, self._frames, self._calls = link, rpc.FrameReader(), list[bytes]()

    async def read(self) -> rpc.RpcCall[Question | rpc.CancelCall]:
        while not self._calls:
            await anyio.wait_readable(self._link)
            self._calls += self._frames.feed(self._link.recv(1 << 16))
        return decode(self._calls.pop(0), rpc.RpcCall[Question | rpc.CancelCall])

    def send(self, answer: rpc.RpcAnswer) -> None:
        self._link.sendall(rpc.frame(answer))


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[RpcClient, Peer]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        client = RpcClient(ours, label="peer (pid 1)")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.run)
            yield client, Peer(theirs)
            tasks.cancel_scope.cancel()


def test_answers_may_overtake_one_another():
    async def main() -> None:
        answers: dict[str, str] = {}

        async def ask(text: str) -> None:
            answers[text] = await client.call(Question(text), str)

        async with connected() as (client, peer), anyio.create_task_group() as tasks:
            for text in "ab":
                tasks.start_soon(ask, text)
            calls = [await peer.read(), await peer.read()]
            for call in reversed(calls):
                assert isinstance(call.body, Question)
                peer.send(rpc.reply(call.id, call.body.text.upper()))
        assert answers == {"a": "A", "b": "B"}

    anyio.run(main)


def test_cancelled_call_is_told_and_its_late_answer_is_dropped():
    async def main() -> None:
        async with connected() as (client, peer):
            with anyio.move_on_after(0.01):
                await client.call(Question("slow"), str)
            call = await peer.read()
            cancel = await peer.read()
            assert cancel.body == rpc.CancelCall(call=call.id)
            peer.send(rpc.reply(call.id, "late"))
            async with anyio.create_task_group() as tasks:

                async def ask() -> None:
                    assert await client.call(Question("next"), int) == 1

                tasks.start_soon(ask)
                peer.send(rpc.reply((await peer.read()).id, 1))

    anyio.run(main)


def test_answer_of_another_type_is_an_error_that_names_the_peer_and_the_call():
    async def main() -> None:
        async with connected() as (client, peer), anyio.create_task_group() as tasks:

            async def ask() -> None:
                with pytest.raises(PipelineError, match=r"^peer \(pid 1\) answered Question with something else: "):
                    await client.call(Question("x"), int)

            tasks.start_soon(ask)
            peer.send(rpc.reply((await peer.read()).id, "text"))

    anyio.run(main)


def test_what_cannot_be_sent_is_refused_and_the_connection_goes_on():
    class Bad(msgspec.Struct, tag=True):
        value: object

    async def main() -> None:
        async with connected() as (client, peer), anyio.create_task_group() as tasks:
            with pytest.raises(TypeError, match="object cannot be encoded"):
                await client.call(Bad(object()), str)

            async def ask() -> None:
                assert await client.call(Question("x"), str) == "fine"

            tasks.start_soon(ask)
            peer.send(rpc.reply((await peer.read()).id, "fine"))

    anyio.run(main)


def test_death_ends_open_calls_and_refuses_new_ones_with_the_first_reason():
    async def main() -> None:
        async with connected() as (client, _):
            deaths: list[str] = []

            async def ask() -> None:
                try:
                    await client.call(Question("x"), str)
                except WorkerDied as death:
                    deaths.append(str(death))

            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                client.mark_dead("it was so")
                client.mark_dead("another reason")
            await ask()
            assert deaths == ["it was so"] * 4
            assert str(await client.ended()) == "it was so"

    anyio.run(main)


def test_answer_that_nobody_asked_for_is_refused():
    async def main() -> None:
        async with connected() as (_, peer):
            peer.send(rpc.reply(0, None))
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as caught:
        anyio.run(main)
    assert "nobody asked for" in repr(caught.value.exceptions)
