"""A real vLLM server, started once for all of these tests: `make vllm`, then `pytest -m vllm`."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import numpy as np
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from tests.e2e.tiny import answer_fraction, write_prompts
from tests.e2e.vllm_tiny import CONTEXT, build, logprobs, logprobs_across, weights, write_model
from torch._C._distributed_c10d import PrefixStore
from transformers import AutoModelForCausalLM

from corrente.common.local_spawner import open_local_spawner
from corrente.config import Collective, Disk, Http, Lora, Model, OldWeights, Run, RunConfig, Shm, Vllm
from corrente.config.load import parse_config
from corrente.controller.parts import RunResult
from corrente.data.types import Completion, Request, Sampling, Tokens
from corrente.engine.embedded.stop_conditions import load_decoder
from corrente.engine.launcher import Replica
from corrente.engine.vllm import environment
from corrente.engine.vllm.client import Client, ServerError, open_client
from corrente.engine.vllm.engine import VllmEngine
from corrente.engine.vllm.launcher import VllmLauncher
from corrente.entrypoints.inputs import RunInputs
from corrente.entrypoints.train import run_training
from corrente.errors import SyncError, WorkerDied
from corrente.runtime.run_weights import RunWeights
from corrente.sim.parts import RecordingSink
from corrente.sync import sender
from corrente.sync.base import OfferRequest, Update
from corrente.sync.collective import meeting_place
from corrente.sync.layout import Layout
from corrente.sync.offers import DiskOffer
from corrente.sync.shared_memory import SharedMemory
from corrente.sync.weight_slots import map_slots
from corrente.testing import EngineCase, check_engine

pytestmark = pytest.mark.vllm

PROMPT = np.array([5, 6, 7, 8, 9], np.int32)
LONG = 1500
"""Tokens. Longer than it takes to see that a request goes on and to act on it, however busy the machine is."""


class Bench:
    """A server, the portal its client lives in, and a learner's end of any transport."""

    def __init__(
        self, portal: BlockingPortal, config: RunConfig, engine: VllmEngine, layout: Layout, memory: SharedMemory
    ):
        self._portal, self._config, self._engine, self.layout, self._memory = portal, config, engine, layout, memory
        self._shared = map_slots(layout, fd=memory.fd)

    def run(self, body: Callable[[], Awaitable[Any]]) -> Any:
        async def safely() -> Any:
            try:
                with anyio.fail_after(900.0):
                    return await body()
            except pytest.fail.Exception as failure:  # no Exception: it would end the portal
                raise AssertionError(str(failure)) from failure

        return self._portal.call(safely)

    def engine(self) -> VllmEngine:
        """One that holds no weights yet, over the same server."""
        fresh = VllmEngine(self._engine.client, decode=load_decoder(Path(self._config.model.path)))
        fresh.served_model, fresh.context = self._engine.served_model, self._engine.context
        return fresh

    def sender(self, sync: Any) -> sender.WeightSender:
        config = msgspec.structs.replace(self._config, sync=sync)
        if isinstance(sync, Shm):
            return sender.build(config, self.layout, shared=self._shared, path=self._memory.path)
        return sender.build(config, self.layout)


@asynccontextmanager
async def _launched(config: RunConfig, memory: SharedMemory, *, logs: Path | None = None) -> AsyncGenerator[Replica]:
    async with open_local_spawner() as spawner:
        launcher = VllmLauncher(config, weights=RunWeights(memory), spawner=spawner, logs=logs)
        async with launcher.launch(0) as replica:
            yield replica


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("vllm")
    config = RunConfig(
        run=Run(dir=str(folder)), model=Model(path=str(write_model(folder / "model"))), engine=Vllm(max_context=CONTEXT)
    )
    memory = SharedMemory()
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(_launched(config, memory, logs=folder)) as replica,
    ):
        yield Bench(portal, config, replica.engine, replica.layout, memory)  # pyright: ignore[reportArgumentType]
    memory.close()


class Publisher:
    """Publishes models to one engine, slot after slot."""

    def __init__(self, bench: Bench, engine: VllmEngine, sync: Any = None) -> None:
        self._engine, self._sender = engine, bench.sender(sync or Shm())
        self._version = -1

    async def stage(self, model: Any, version: int | None = None) -> Update:
        self._version = self._version + 1 if version is None else version
        held = self._engine.current_update
        slot = 0 if held is None else 1 - held.slot
        await self._engine.reserve(slot)
        request = OfferRequest(version=self._version, slot=slot, live=None if held is None else held.version)
        await anyio.to_thread.run_sync(lambda: self._sender.export(self._version, weights(model), slot=slot))
        await self._engine.receive(await anyio.to_thread.run_sync(self._sender.offer, request))
        return Update(version=self._version, slot=slot)

    async def publish(self, model: Any, mode: Any = "swap") -> float:
        return await self._engine.apply(await self.stage(model), mode)

    def close(self) -> None:
        self._sender.close()


async def _until(engine: VllmEngine, tokens: int, names: Sequence[str]) -> None:
    """Wait until so many tokens of these requests were sampled; whoever asks has requests that are long enough."""
    seen = 0
    while seen < tokens:
        await anyio.sleep(0.005)
        partials = await engine.partial_completions(names)
        assert partials or not seen, "the requests ended too early"
        seen = sum(len(partial.tokens) for partial in partials.values())


def test_vllm_keeps_the_contract_of_an_engine(bench: Bench) -> None:
    @asynccontextmanager
    async def make() -> AsyncGenerator[EngineCase]:
        engine = bench.engine()
        publisher, model = Publisher(bench, engine), build(0)

        async def broken(version: int) -> Update:
            return Update(version=version, slot=7)

        yield EngineCase(
            engine=engine,
            stage=lambda version: publisher.stage(model, version),
            prompt=PROMPT,
            context=CONTEXT,
            long_tokens=LONG,
            broken=broken,
            tick_s=0.005,
            by_position=False,
            snapshot=False,
        )

    bench.run(lambda: check_engine(make, deadline_s=300.0))


def test_sampled_logprobs_are_those_of_the_distribution_that_was_sampled_from(bench: Bench) -> None:
    async def body() -> None:
        engine, model = bench.engine(), build(3)
        await Publisher(bench, engine).publish(model)
        for at, sampling in enumerate(
            (
                Sampling(max_tokens=40),
                Sampling(max_tokens=40, temperature=0.7),
                Sampling(max_tokens=40, top_k=5),
                Sampling(max_tokens=40, top_p=0.8),
                Sampling(max_tokens=40, min_p=0.1),
                Sampling(max_tokens=40, temperature=1.3, top_k=20, top_p=0.9),
                Sampling(max_tokens=40, temperature=0.0),
            )
        ):
            done = await engine.generate(Request(id=f"s{at}", tokens=PROMPT, sampling=sampling, seed=at))
            gap = np.abs(done.logprobs - logprobs(model, PROMPT, done, sampling))
            assert gap.mean() < 1e-4, (sampling, gap.max())
            scores = await engine.score(np.concatenate([PROMPT, done.tokens]))
            plain = logprobs(model, PROMPT, done)
            assert np.abs(scores.logprobs[len(PROMPT) - 1 :] - plain).mean() < 1e-4

    bench.run(body)


def test_score_gives_the_likeliest_tokens(bench: Bench) -> None:
    async def body() -> None:
        engine, model = bench.engine(), build(4)
        await Publisher(bench, engine).publish(model)
        tokens = np.arange(2, 20, dtype=np.int32)
        scores = await engine.score(tokens, top=4)
        with torch.no_grad():
            rows = model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1].log_softmax(-1)
        best = rows.topk(4)
        assert (scores.top_ids == best.indices.numpy()).all()
        assert np.allclose(scores.top_logprobs, best.values.numpy(), atol=1e-4)
        given = rows[torch.arange(len(tokens) - 1), torch.from_numpy(tokens[1:].astype(np.int64))]
        assert np.allclose(scores.logprobs, given.numpy(), atol=1e-4)

    bench.run(body)


async def _through_an_update(
    bench: Bench, mode: str, old: Any, new: Any, *, at_once: int = 4
) -> list[tuple[Tokens, Completion]]:
    """Requests that live through an update: their prompts and what they became."""
    engine = bench.engine()
    publisher = Publisher(bench, engine)
    await publisher.publish(old)
    done: list[tuple[Tokens, Completion]] = []

    async def one(at: int) -> None:
        prompt = PROMPT + at
        request = Request(id=f"{mode}/{at}", tokens=prompt, sampling=Sampling(max_tokens=LONG), seed=at)
        done.append((prompt, await engine.generate(request)))

    async with anyio.create_task_group() as tasks:
        for at in range(at_once):
            tasks.start_soon(one, at)
        names = [f"{mode}/{at}" for at in range(at_once)]
        await _until(engine, 20 * at_once, names)
        partials = await engine.partial_completions(names)
        assert all({span.version for span in partial.spans} == {0} for partial in partials.values())
        await publisher.publish(new, mode)
        with anyio.fail_after(60):  # those that live on show it while they are written
            while any(
                [s.version for s in p.spans] != [0, 1] for p in (await engine.partial_completions(names)).values()
            ):
                await anyio.sleep(0.005)
    return done


def test_every_token_is_worth_what_the_weights_of_its_version_say(bench: Bench) -> None:
    """Over the keys that the old weights left, as swap promises."""
    old, new = build(5), build(6)
    for prompt, done in bench.run(lambda: _through_an_update(bench, "swap", old, new)):
        assert [span.version for span in done.spans] == [0, 1]
        exact = logprobs_across(old, new, prompt, done, done.spans[1].start)
        assert np.abs(done.logprobs - exact).max() < 1e-3, np.abs(done.logprobs - exact).argmax()
        for off in (-1, 1):
            shifted = logprobs_across(old, new, prompt, done, done.spans[1].start + off)
            assert np.abs(done.logprobs - shifted).max() > 1e-2, "the test cannot tell where versions change"


def test_recompute_goes_on_as_a_fresh_pass_under_the_new_weights(bench: Bench) -> None:
    old, new = build(7), build(8)
    for prompt, done in bench.run(lambda: _through_an_update(bench, "recompute", old, new)):
        assert [span.version for span in done.spans] == [0, 1]
        at = done.spans[1].start
        assert np.abs(done.logprobs[:at] - logprobs(old, prompt, done)[:at]).max() < 1e-3
        assert np.abs(done.logprobs[at:] - logprobs(new, prompt, done)[at:]).max() < 1e-3


@pytest.mark.parametrize("prefix_cache", ["salt", "reset"])
def test_prefix_cache_serves_no_keys_of_old_weights(bench: Bench, prefix_cache: Any) -> None:
    async def body() -> None:
        engine, old, new = bench.engine(), build(9), build(10)
        engine.prefix_cache = prefix_cache
        publisher = Publisher(bench, engine)
        prompt = np.resize(np.arange(2, 40, dtype=np.int32), 700)
        for version, model in enumerate((old, new)):
            await publisher.publish(model)
            for again in range(2):
                request = Request(id=f"{version}/{again}", tokens=prompt, sampling=Sampling(max_tokens=8), seed=again)
                done = await engine.generate(request)
                assert np.abs(done.logprobs - logprobs(model, prompt, done)).max() < 1e-3

    bench.run(body)


@pytest.mark.parametrize("sync", [Shm(), Disk(), Http(), Collective(bucket_mb=1)], ids=lambda sync: type(sync).__name__)
def test_weights_arrive_over(bench: Bench, sync: Any) -> None:
    """Twice into each slot, by every transport; the engine then is the model, for all its vocabulary."""

    async def body() -> None:
        engine = bench.engine()
        publisher = Publisher(bench, engine, sync)
        try:
            for seed in range(20, 24):
                model = build(seed)
                await publisher.publish(model)
                done = await engine.generate(Request(id=str(seed), tokens=PROMPT, sampling=Sampling(max_tokens=30)))
                assert np.abs(done.logprobs - logprobs(model, PROMPT, done)).max() < 1e-3
        finally:
            await anyio.to_thread.run_sync(publisher.close)

    bench.run(body)


def test_transfer_that_fails_leaves_the_old_version(bench: Bench, tmp_path: Path) -> None:
    async def body() -> None:
        engine, model = bench.engine(), build(11)
        publisher = Publisher(bench, engine)
        await publisher.publish(model)
        await engine.reserve(1)
        with pytest.raises(SyncError, match="holds no complete version"):
            await engine.receive(
                DiskOffer(version=1, slot=1, nbytes=bench.layout.nbytes, path=str(tmp_path / "nothing"))
            )
        with pytest.raises(SyncError, match="slot 1 holds nothing"):
            await engine.apply(Update(version=1, slot=1), "swap")
        done = await engine.generate(Request(id="old", tokens=PROMPT, sampling=Sampling(max_tokens=20)))
        assert {span.version for span in done.spans} == {0}
        assert np.abs(done.logprobs - logprobs(model, PROMPT, done)).max() < 1e-3
        await publisher.publish(build(12))

    bench.run(body)


def test_stop_strings_and_stop_tokens_end_a_completion(bench: Bench) -> None:
    async def body() -> None:
        engine = bench.engine()
        await Publisher(bench, engine).publish(build(13))
        plain = await engine.generate(Request(id="a", tokens=PROMPT, sampling=Sampling(max_tokens=60), seed=5))
        ninth = int(plain.tokens[9])
        first = plain.tokens.tolist().index(ninth)
        asked = Sampling(max_tokens=60, stop_token_ids=(ninth,))
        done = await engine.generate(Request(id="b", tokens=PROMPT, sampling=asked, seed=5))
        assert done.finish_reason == "stop"
        assert done.tokens.tolist() == plain.tokens[: first + 1].tolist()
        assert done.text == plain.text[:first]
        stop = plain.text[7:10]
        cut = plain.text.index(stop)
        done = await engine.generate(
            Request(id="c", tokens=PROMPT, sampling=Sampling(max_tokens=60, stop=(stop,)), seed=5)
        )
        assert (done.finish_reason, done.text) == ("stop", plain.text[:cut])
        written = cut + 1
        resumed = Request(
            id="d",
            tokens=np.concatenate([PROMPT, plain.tokens[:written]]),
            sampling=Sampling(max_tokens=60, stop=(stop,), temperature=0.0),
            written=written,
        )
        done = await engine.generate(resumed)
        assert done.text.startswith(plain.text[:cut])
        assert stop not in done.text

    bench.run(body)


def test_every_path_asks_for_the_token(bench: Bench) -> None:
    """Also those that vLLM leaves open, which stop the server or change its weights."""

    async def body() -> None:
        http = bench.engine().client.http
        for path in (
            "/pause",
            "/collective_rpc",
            "/update_weights",
            "/corrente/flip",
            "/inference/v1/generate",
            "/v1/models",
        ):
            for wrong in ("Bearer wrong", ""):
                answer = await http.post(path, headers={"Authorization": wrong}, json={})
                assert answer.status_code == 401, path
        assert (await http.get("/health", headers={"Authorization": ""})).status_code == 200

    bench.run(body)


ITS_OWN = """
import asyncio, json, sys
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.v1.engine.async_llm import AsyncLLM
from corrente.engine.vllm import server
from corrente.sync import vllm_nccl

asked = json.loads(sys.argv[1])
told = []


class Engine:
    async def start_weight_update(self): told.append("start")
    async def update_weights(self, request): told.append(NCCLWeightTransferUpdateInfo(**request.update_info).names)
    async def finish_weight_update(self): told.append("finish")
    async def update_weight_version(self, label): told.append(label)
    async def resume_generation(self): told.append("resume")


class Broken(Engine):
    async def update_weights(self, request): raise RuntimeError("ncclSystemError")


for name in vars(Engine):
    assert name.startswith("_") or callable(getattr(AsyncLLM, name)), name
assert callable(AsyncLLM.init_weight_transfer_engine)
server._meeting(asked["meeting"]).add(server.RANKS, 2)
first, ranks = server._take_ranks({**asked["meeting"], "members": 1}, 3)
NCCLWeightTransferInitInfo(rank_offset=first, world_size=1 + ranks, nccl_unique_id_b64=asked["id"], packed=True,
                           packed_buffer_size_bytes=1, packed_num_buffers=server.BUFFERS)
same = ("ARRIVED", "RANKS", "READY")
assert [getattr(server, name) for name in same] == [getattr(vllm_nccl, name) for name in same]
assert server.BUFFERS == vllm_nccl.IN_FLIGHT
answers = [asyncio.run(server._load(engine, asked, 0.0)).status_code for engine in (Engine(), Broken())]
print(json.dumps([first, ranks, answers, told]))
"""


def test_vllms_own_nccl_engine_is_told_what_it_expects() -> None:
    """As far as that goes without a GPU: with its own types, a real store, and an engine that only takes notes."""
    store, port = meeting_place("127.0.0.1", deadline_s=60.0)
    meeting = {"host": "127.0.0.1", "port": port, "generation": 1, "members": 1, "deadline_s": 60.0}
    update = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
    unique_id = base64.b64encode(bytes(128)).decode()
    asked = {"meeting": meeting, "version": 4, "label": "mark/4", "update": update, "id": unique_id}
    python = str(environment.find().python)
    packages = str(Path(environment.__file__).parents[3])
    done = subprocess.run(
        [python, "-W", "ignore", "-c", ITS_OWN, msgspec.json.encode(asked).decode()],
        env={**os.environ, "PYTHONPATH": packages},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    first, ranks, answers, told = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert (first, ranks) == (3, 5)
    assert answers == [200, 500]
    assert told == ["start", ["w"], "finish", "mark/4", "resume", "start"], "after a failure it stays paused"
    assert PrefixStore("generation 1", store).add("ready 4", 0) == 2


def _folders() -> set[Path]:
    """Those of all servers that run on this machine, each its own."""
    return {socket.parent for socket in Path(tempfile.gettempdir()).glob("corrente-vllm-*/http")}


def _processes(word: str) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if word.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def test_server_that_loses_a_process_is_dead_within_a_second_and_leaves_nothing(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And the request that waited for it says so, with the last it wrote."""
    config = RunConfig(model=Model(path=str(write_model(tmp_path / "model"))), engine=Vllm(max_context=128))
    memory = SharedMemory()
    others = _folders()

    async def run() -> None:
        async with _launched(config, memory) as replica:
            engine: Any = replica.engine
            mapped = SharedMemory()
            mapped.reserve(replica.layout.nbytes)
            slots = map_slots(replica.layout, fd=mapped.fd)
            box = sender.build(config, replica.layout, shared=slots, path=mapped.path)
            box.export(0, weights(build(0)), slot=0)
            await engine.receive(box.offer(OfferRequest(version=0, slot=0)))
            await engine.apply(Update(version=0, slot=0), "swap")
            (folder,) = _folders() - others
            ours = _processes(str(folder))
            core = next(pid for pid in ours if "EngineCor" in Path(f"/proc/{pid}/comm").read_text())
            failures: list[Exception] = []

            async def ask() -> None:
                try:
                    await engine.generate(Request(id="x", tokens=PROMPT, sampling=Sampling(max_tokens=120)))
                except WorkerDied as death:
                    failures.append(death)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await _until(engine, 1, ["x"])
                os.kill(core, signal.SIGKILL)
                with anyio.fail_after(1.0):
                    death = await replica.ended()
            assert "vllm-0 (pid" in str(death)
            assert f"process {core} of the server ended" in str(death)
            assert failures
        assert not _processes(str(folder))
        assert not folder.exists()

    anyio.run(run)
    memory.close()


def _train(folder: Path, *settings: str) -> tuple[RunResult, RecordingSink]:
    """A short run whose updates land in flight."""
    write_model(folder / "model", ends=True)
    tables: dict[str, Any] = {
        "run": {"dir": str(folder / "runs"), "steps": 8, "prompts_per_step": 2, "group_size": 4},
        "model": {"path": str(folder / "model")},
        "prompts": {"kind": "jsonl", "path": str(write_prompts(folder / "prompts.jsonl", count=100))},
        "sampling": {"max_tokens": 48},
        "engine": {"kind": "vllm"},
        "inflight": {"kind": "swap"},
        "staleness": {"max": 2},
        "learner": {"lr": 0.003},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
    }
    config = parse_config(tables, settings)
    sink = RecordingSink()
    given = RunInputs(reward_functions=[answer_fraction])
    outcome = anyio.run(lambda: run_training(config, sinks=[sink], inputs=given, signals=False))
    assert (outcome.ended, outcome.steps, outcome.version) == ("steps", 8, 8)
    return outcome, sink


def _agrees(sink: RecordingSink) -> None:
    """The learner gives the engine's tokens of its own version, behind no keys of another, the log-probs that the engine gave."""
    name = "mismatch_clean/logprob_gap_mean"
    gaps = [row[name] for _, row in sink.rows if name in row]
    assert gaps
    assert max(gaps) < 1e-4, gaps


def test_run_trains_on_vllm_with_updates_in_flight(tmp_path: Path) -> None:
    _, sink = _train(tmp_path, "engine.max_context=128")
    _agrees(sink)


@contextlib.contextmanager
def _servers(count: int, model: Path, token: str) -> Iterator[list[str]]:
    """Started by hand, as docs/how-to/vllm.md says."""
    where = environment.find()
    ports = [_free_port() for _ in range(count)]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": token}
    packages = {"PYTHONPATH": str(Path(environment.__file__).parents[3]), "HF_HUB_OFFLINE": "1"}
    serve = [str(where.python), "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    sized = ("--max-model-len", "128", "--max-num-batched-tokens", "2048", "--kv-cache-memory-bytes", str(1 << 26))
    with contextlib.ExitStack() as stack:
        for port in ports:
            process = subprocess.Popen(
                [
                    *(*serve, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", *sized),
                    *(*environment.SERVING, *environment.WEIGHTS, *environment.ON_CPU),
                ],
                env={**os.environ, **variables, **packages},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            stack.callback(_end, process)
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        anyio.run(_until_healthy, urls)
        yield urls


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def _until_healthy(urls: list[str]) -> None:
    with anyio.fail_after(500.0):
        for url in urls:
            async with open_client(Client(url)) as client:
                while True:
                    try:
                        await client.get("/health")
                        break
                    except ServerError:
                        await anyio.sleep(0.5)


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20.0)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_run_attaches_to_two_servers_that_run_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each becomes a replica, gets every version, and does its part; the run leaves them as servers that go on."""
    monkeypatch.setenv("CORRENTE_VLLM_TOKEN", "sesame")
    with _servers(2, write_model(tmp_path / "model", ends=True), "sesame") as urls:
        _, sink = _train(tmp_path, f"engine.urls={msgspec.json.encode(urls).decode()}", "sync.kind=disk")
        _agrees(sink)

        async def asked(url: str) -> str:
            async with open_client(Client(url, token="sesame")) as client:
                return str((await client.http.get("/metrics")).text)

        for url in urls:
            done = [
                line for line in anyio.run(asked, url).splitlines() if line.startswith("vllm:request_success_total")
            ]
            assert sum(float(line.split()[-1]) for line in done) > 0, url


def test_adapters_are_served_by_version_and_kept_while_in_use(tmp_path: Path) -> None:
    """Adapter-only: what is served is the learner's policy, live requests keep theirs, and an old version goes with the last."""
    pytest.importorskip("peft")
    from corrente.adapters.lora import LoraAdapters as Adapted

    source = write_model(tmp_path / "model", layers=6)
    settings = Lora(rank=4, alpha=32.0)
    config = RunConfig(
        model=Model(path=str(source)), engine=Vllm(max_context=CONTEXT), adapters=settings, inflight=OldWeights()
    )
    learners = [
        Adapted(settings, source=source, load=lambda path: AutoModelForCausalLM.from_pretrained(path).eval(), seed=seed)
        for seed in range(3)
    ]
    for seed, learner in enumerate(learners):
        torch.manual_seed(seed)
        for tensor in learner.tensors().values():
            tensor.normal_(std=0.2)
    memory = SharedMemory()

    async def run() -> None:
        async with _launched(config, memory, logs=tmp_path) as replica:
            engine: Any = replica.engine
            assert replica.layout.nbytes < 0.5 * sum(t.nbytes for t in learners[0].model.state_dict().values())
            slots = map_slots(replica.layout, fd=memory.fd)
            box = sender.build(config, replica.layout, shared=slots, path=memory.path)

            async def stage(version: int) -> Update:
                await engine.reserve(version % 2)
                box.export(version, learners[version].tensors(), slot=version % 2)
                await engine.receive(box.offer(OfferRequest(version=version, slot=version % 2)))
                return Update(version=version, slot=version % 2)

            await engine.apply(await stage(0), "swap")
            done: dict[str, Completion] = {}

            async def one(name: str, tokens: int) -> None:
                request = Request(id=name, tokens=PROMPT, sampling=Sampling(max_tokens=tokens))
                done[name] = await engine.generate(request)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one, "old", LONG)
                await _until(engine, 10, ["old"])
                update = await stage(1)
                with pytest.raises(SyncError, match="1 requests are live"):
                    await engine.apply(update, "swap")
                assert await engine.apply(update, "snapshot") < 0.01
                await one("new", 30)
                assert "old" not in done, "the old request lives on"
                held = {path.name for path in engine.adapter_folder.glob("*-v0")}
                with anyio.move_on_after(0.3):
                    await engine.reserve(0)
                assert {path.name for path in engine.adapter_folder.glob("*-v0")} == held, "an adapter in use stays"
                assert "old" not in done
            await engine.apply(await stage(2), "snapshot")
            assert not list(engine.adapter_folder.glob("*-v0"))
            await one("newest", 30)
            scores = await engine.score(np.concatenate([PROMPT, done["newest"].tokens]))
            for version, name in enumerate(("old", "new", "newest")):
                completion = done[name]
                assert {span.version for span in completion.spans} == {version}
                own = np.abs(completion.logprobs - logprobs(learners[version].model, PROMPT, completion))
                assert (own.mean() < 1e-4, own.max() < 1e-2) == (True, True), (own.mean(), own.max())
                other = logprobs(learners[(version + 1) % 3].model, PROMPT, completion)
                assert np.abs(completion.logprobs - other).mean() > 1e-1
            assert np.abs(scores.logprobs[len(PROMPT) - 1 :] - done["newest"].logprobs).max() < 1e-3

    anyio.run(run)
    memory.close()


@pytest.mark.model
def test_real_model_agrees_with_the_learner(smollm2: Path, tmp_path: Path) -> None:
    """The run of the example on vLLM, a few steps, with updates in flight: the gap to the learner at equal weights."""
    tables: dict[str, Any] = {
        "run": {"dir": str(tmp_path / "runs"), "steps": 3, "prompts_per_step": 4, "group_size": 4},
        "model": {"path": str(smollm2)},
        "prompts": {"kind": "arithmetic", "digits": 1},
        "sampling": {"max_tokens": 12, "stop": ["\n"]},
        "engine": {"kind": "vllm", "max_context": 256, "max_sequences": 32},
        "inflight": {"kind": "swap"},
        "staleness": {"max": 1},
        "eval": {"every": 0},
        "checkpoint": {"every": 0},
    }
    sink = RecordingSink()
    outcome = anyio.run(lambda: run_training(parse_config(tables, ()), sinks=[sink], signals=False))
    assert (outcome.ended, outcome.version) == ("steps", 3)
    _agrees(sink)
