"""The ASGI middleware that corrente adds to vLLM's API server.

    vllm serve ... --middleware corrente.engine.vllm.server.Middleware

- Every path asks for the bearer token (VLLM_API_KEY), not only those that vLLM guards: pausing and new weights are no less
  dangerous than requests. /health stays open.
- ``POST /corrente/flip``: pause, install, label, resume, as one call. A controller that dies in the middle cannot leave the
  engine paused, and no round trip of the network is part of the pause.
- ``POST /corrente/join``: for vLLM's own NCCL engine, meet the learner at its store and form a communicator with it.
- A stream reports with every piece, and not only at its end, which weights sampled which tokens.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import hmac
import os
import time
from datetime import timedelta
from typing import Any

import msgspec
from starlette.responses import JSONResponse
from torch._C._distributed_c10d import PrefixStore, TCPStore
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.output_processor import RequestState

FLIP = "/corrente/flip"
JOIN = "/corrente/join"
ARRIVED, RANKS, READY, BUFFERS = "arrived", "ranks", "ready", 2
"""Keys of the store at which learner and servers meet; sync/vllm_nccl.py has the same."""
OPEN = ("/health",)


class Middleware:
    """See the module."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._token = os.environ.get("VLLM_API_KEY", "")

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] not in OPEN and not self._allowed(scope):
            await JSONResponse({"error": "a valid bearer token is needed"}, status_code=401)(scope, receive, send)
        elif scope["path"] == FLIP:
            await (await _flip(scope, receive))(scope, receive, send)
        elif scope["path"] == JOIN:
            await (await _join(scope, receive))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _allowed(self, scope: Any) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return not self._token or hmac.compare_digest(given, f"Bearer {self._token}".encode())


async def _flip(scope: Any, receive: Any) -> JSONResponse:
    """{"slot", "version", "label", "recompute", "back"} -> {"pause_s"}.

    ``recompute`` forgets all keys: live requests rebuild theirs. On failure the weights of ``back`` (a slot and its version)
    are in use again, and the answer says why.
    """
    asked = msgspec.json.decode(await _body(receive))
    engine = scope["app"].state.engine_client
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=asked["recompute"])
    started = time.perf_counter()
    if "update" in asked:
        return await _load(engine, asked, started)
    try:
        await _install(engine, asked["slot"], asked["version"])
        await engine.update_weight_version(asked["label"])
    except Exception as error:
        if asked["back"] is not None:
            await _install(engine, *asked["back"])
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
    finally:
        await engine.resume_generation()
    return JSONResponse({"pause_s": time.perf_counter() - started})


async def _load(engine: Any, asked: dict[str, Any], started: float) -> JSONResponse:
    """A flip by vLLM's own engine, which loads in place as the bytes arrive. On failure the server stays paused."""
    try:
        await engine.start_weight_update()
        await asyncio.to_thread(lambda: _meeting(asked["meeting"]).add(f"{READY} {asked['version']}", 1))
        await engine.update_weights(WeightTransferUpdateRequest(update_info=asked["update"]))
        await engine.finish_weight_update()
        await engine.update_weight_version(asked["label"])
    except Exception as error:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
    await engine.resume_generation()
    return JSONResponse({"pause_s": time.perf_counter() - started})


async def _join(scope: Any, receive: Any) -> JSONResponse:
    """Take as many ranks as this server has workers, and return when the communicator is formed."""
    asked = msgspec.json.decode(await _body(receive))
    engine = scope["app"].state.engine_client
    workers = engine.vllm_config.parallel_config.world_size_across_dp
    try:
        first, ranks = await asyncio.to_thread(_take_ranks, asked, workers)
        await engine.init_weight_transfer_engine(
            WeightTransferInitRequest(
                init_info={
                    "rank_offset": first,
                    "world_size": 1 + ranks,
                    "nccl_unique_id_b64": asked["unique_id"],
                    "packed": True,
                    "packed_buffer_size_bytes": asked["bucket_bytes"],
                    "packed_num_buffers": BUFFERS,
                }
            )
        )
    except Exception as error:
        return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=500)
    return JSONResponse({"rank": first})


def _take_ranks(asked: dict[str, Any], workers: int) -> tuple[int, int]:
    """The first rank of this server's workers, and the ranks of all servers, once all are there."""
    place = _meeting(asked)
    first = place.add(RANKS, workers) - workers + 1
    place.add(ARRIVED, 1)
    until = time.monotonic() + asked["deadline_s"]
    while place.add(ARRIVED, 0) < asked["members"]:
        if time.monotonic() > until:
            raise TimeoutError(f"fewer than {asked['members']} servers came to meet the learner")
        time.sleep(0.01)
    return first, place.add(RANKS, 0)


def _meeting(asked: dict[str, Any]) -> PrefixStore:
    timeout = timedelta(seconds=asked["deadline_s"])
    store = TCPStore(asked["host"], asked["port"], None, False, timeout, wait_for_workers=False)
    return PrefixStore(f"generation {asked['generation']}", store)


async def _install(engine: Any, slot: int, version: int) -> None:
    await engine.start_weight_update()
    await engine.update_weights(WeightTransferUpdateRequest(update_info={"install": slot, "version": version}))
    await engine.finish_weight_update()


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body


_completed = RequestState._new_completion_output


def _with_versions(self: Any, *args: Any, **kwargs: Any) -> Any:
    output = _completed(self, *args, **kwargs)
    if output.weight_versions is None:
        output.weight_versions = self._weight_version_spans()
    return output


RequestState._new_completion_output = _with_versions
