"""Correctness and speed of engine, learner and publish on one accelerator. Installs nothing; prints what it finds.

    python benchmarks/gpu/check.py                         a random model of SmolLM2-135M's shape, on cuda
    python benchmarks/gpu/check.py --model DIR             a real one
    python benchmarks/gpu/check.py --device cpu --tiny     the script itself, anywhere

Per dtype and model path (lean, hf): log-probs of engine and learner at equal weights; greedy tokens against transformers'
generate; caches rebuilt under new weights against a fresh forward; one optimizer step, published and compared again. Exit code 1
when a check fails. Then figures: decode and prefill tokens/s, seconds per step, publish bandwidth, pause of a flip.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from corrente.algo.grouped import GroupedAlgorithm
from corrente.config.load import parse_config
from corrente.data.types import Completion, Episode, Group, Prompt, Request, Sampling, Turn
from corrente.engine.embedded.core import EmbeddedCore
from corrente.learner.core import TorchLearner
from corrente.sync import pack
from corrente.sync.base import Update
from corrente.sync.weight_slots import allocate_slots

GAP_MEAN = {"float32": 1e-4, "bfloat16": 2e-2}
"""Largest mean |engine - learner| log-prob at equal weights."""

SHAPES: dict[bool, dict[str, Any]] = {
    False: {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 4096,
    },
    True: {
        "vocab_size": 211,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
}


class Bench:
    """One engine and one learner over the same model, joined by two weight buffers on the device."""

    def __init__(self, model: Path, *, device: str, dtype: str, path: str, sequences: int) -> None:
        self.config = parse_config({"model": {"path": str(model), "dtype": dtype}, "run": {"steps": 10}})
        self.device = device
        self.engine = EmbeddedCore(model=model, dtype=dtype, device=device, max_sequences=sequences, path=path)
        self.learner = TorchLearner(self.config, device=device)
        self.layout = self.engine.layout()
        self.buffers = allocate_slots(self.layout, device=device)
        self.engine.attach_buffers(self.buffers)
        self.version = -1
        self.publish()

    def publish(self, mode: Any = "swap") -> tuple[float, float]:
        """Seconds to stage the learner's weights, and to flip to them."""
        self.version += 1
        slot = self.version % 2
        stage_s = self._timed(lambda: pack.write(self.layout, self.learner.tensors(), self.buffers[slot]))
        update = Update(version=self.version, slot=slot, nbytes=self.layout.nbytes)
        return stage_s, self._timed(lambda: self.engine.apply(update, mode))

    def generate(self, requests: list[Request]) -> tuple[dict[str, Completion], float]:
        out: dict[str, Completion] = {}

        def work() -> None:
            for request in requests:
                self.engine.submit(request)
            while not self.engine.idle:
                self.collect(out)

        return out, self._timed(work)

    def collect(self, out: dict[str, Completion]) -> None:
        """One engine step."""
        for key, outcome in self.engine.step():
            if not isinstance(outcome, Completion):
                raise outcome
            out[key] = outcome

    def train(self, groups: list[Group]) -> tuple[dict[str, float], float]:
        algorithm = GroupedAlgorithm(self.config)
        batch = algorithm.batch(groups, step=0, version=self.version, oldest_trainable=[None] * len(groups))
        values: dict[str, float] = {}
        seconds = self._timed(lambda: values.update(self.learner.step(batch)))
        return values, seconds

    def _timed(self, work: Callable[[], object]) -> float:
        self._settle()
        start = time.perf_counter()
        work()
        self._settle()
        return time.perf_counter() - start

    def _settle(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()


def requests_of(
    groups: int, members: int, *, prompt: int, new: int, vocabulary: int, temperature: float = 1.0
) -> list[Request]:
    rng = np.random.default_rng(0)
    sampling = Sampling(max_tokens=new, temperature=temperature)
    prompts = [rng.integers(3, vocabulary, prompt).astype(np.int32) for _ in range(groups)]
    return [
        Request(id=f"{g}/{m}", tokens=tokens, sampling=sampling, seed=97 * g + m, group=str(g))
        for g, tokens in enumerate(prompts)
        for m in range(members)
    ]


def groups_of(requests: list[Request], done: dict[str, Completion]) -> list[Group]:
    """Rewards alternate, so that every group teaches something."""
    by_group: dict[int, list[Episode]] = {}
    prompts: dict[int, Prompt] = {}
    for request in requests:
        g, m = map(int, request.id.split("/"))
        prompts[g] = Prompt(id=str(g), tokens=request.tokens)
        said = done[request.id]
        turns = (
            Turn(speaker="user", tokens=request.tokens),
            Turn(speaker="policy", tokens=said.tokens, completion=said, parent=0),
        )
        by_group.setdefault(g, []).append(
            Episode(prompt_id=str(g), group_id=g, index=m, turns=turns, scores={"r": m % 2}, reward=float(m % 2))
        )
    return [
        Group(id=g, prompt=prompts[g], episodes=tuple(episodes), admitted_version=0) for g, episodes in by_group.items()
    ]


class Checks:
    def __init__(self) -> None:
        self.failed = 0

    def at_most(self, what: str, value: float, limit: float) -> None:
        ok = value <= limit
        self.failed += not ok
        print(f"  {'ok' if ok else 'FAILED':7}{what:58}{value:.2e} (at most {limit:.0e})")

    def equal(self, what: str, same: int, of: int, *, least: int) -> None:
        ok = same >= least
        self.failed += not ok
        print(f"  {'ok' if ok else 'FAILED':7}{what:58}{same} of {of}")


def check(checks: Checks, bench: Bench, model: Path, *, dtype: str, vocabulary: int) -> None:
    requests = requests_of(4, 8, prompt=24, new=16, vocabulary=vocabulary)
    done, _ = bench.generate(requests)
    values, _ = bench.train(groups_of(requests, done))
    limit = GAP_MEAN[dtype]
    checks.at_most("log-prob gap at equal weights, mean", values["mismatch/logprob_gap_mean"], limit)
    checks.at_most("log-prob gap at equal weights, max", values["mismatch/logprob_gap_max"], 30 * limit)

    live = [
        Request(id=f"live/{r.id}", tokens=r.tokens, sampling=r.sampling, seed=r.seed, group=r.group) for r in requests
    ]
    out: dict[str, Completion] = {}
    for request in live:
        bench.engine.submit(request)
    for _ in range(8):
        bench.collect(out)
    bench.publish("recompute")
    while not bench.engine.idle:
        bench.collect(out)
    gaps = [_gap_after_flip(bench, request, out[request.id]) for request in live]
    checks.at_most("after a step and recompute: gap to a fresh forward, mean", float(np.mean(gaps)), limit)
    spanned = sum(len(completion.spans) == 2 for completion in out.values())
    checks.equal("live sequences that carry two version spans", spanned, len(live), least=1)
    if dtype == "float32":
        _greedy(checks, bench, vocabulary)


def _gap_after_flip(bench: Bench, request: Request, said: Completion) -> float:
    """Mean gap of the tokens sampled by the newest version to a forward of the whole sequence under it."""
    whole = np.concatenate([request.tokens, said.tokens]).astype(np.int32)
    scored = bench.engine.score(whole).logprobs[len(request.tokens) - 1 :]
    new = said.versions == bench.version
    return float(np.abs(scored[new] - said.logprobs[new]).mean()) if new.any() else 0.0


def _greedy(checks: Checks, bench: Bench, vocabulary: int) -> None:
    requests = requests_of(8, 1, prompt=24, new=16, vocabulary=vocabulary, temperature=0.0)
    done, _ = bench.generate(requests)
    reference: Any = AutoModelForCausalLM.from_pretrained(bench.config.model.path, dtype=torch.float32)
    reference.to(bench.device)
    reference.load_state_dict({k: v.to(bench.device) for k, v in bench.learner.tensors().items()}, strict=False)
    ids = torch.tensor(np.stack([r.tokens for r in requests]), dtype=torch.long, device=bench.device)
    with torch.inference_mode():
        wanted = reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, pad_token_id=0
        )
    same = 0
    for request, row in zip(requests, wanted[:, ids.shape[1] :].cpu().numpy(), strict=True):
        mine = done[request.id].tokens
        same += bool((row[: len(mine)] == mine).all())
    # Two kernels may break a floating-point tie differently; more than one in eight is a fault.
    checks.equal("greedy completions equal to transformers' generate", same, len(requests), least=len(requests) - 1)


def figures(bench: Bench, *, vocabulary: int, groups: int, new: int) -> None:
    warm = requests_of(groups, 8, prompt=128, new=8, vocabulary=vocabulary)
    bench.generate(warm)
    before = bench.engine.stats()
    requests = requests_of(groups, 8, prompt=128, new=new, vocabulary=vocabulary)
    done, seconds = bench.generate(requests)
    after = bench.engine.stats()
    decoded, prefilled = after.decode_tokens - before.decode_tokens, after.prefill_tokens - before.prefill_tokens
    print(
        f"  {len(requests)} sequences of 128 + {new}: {decoded / seconds:,.0f} tok/s ({prefilled} prompt tokens computed)"
    )
    bench.train(groups_of(requests, done))
    values, step_s = bench.train(groups_of(requests, done))
    print(f"  one step: {step_s:.3f} s, {values['train/distinct_tokens'] / step_s:,.0f} distinct tok/s")
    staged = [bench.publish() for _ in range(5)]
    stage_s, flip_s = min(s for s, _ in staged), max(f for _, f in staged)
    print(
        f"  publish: {bench.layout.nbytes / 1e6:,.0f} MB staged in {stage_s * 1e3:.2f} ms "
        f"({bench.layout.nbytes / stage_s / 1e9:.1f} GB/s), flip pauses {flip_s * 1e3:.3f} ms"
    )


def random_model(folder: Path, *, tiny: bool) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[tiny], tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, initializer_range=0.05
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", type=Path, help="directory of a Hugging Face causal LM; a random one if not given")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, to try the script")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(GAP_MEAN))
    parser.add_argument("--paths", nargs="+", default=["lean", "hf"])
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else args.device
    print(f"{name}, torch {torch.__version__}")
    checks = Checks()
    with tempfile.TemporaryDirectory() as place:
        model = args.model or random_model(Path(place), tiny=args.tiny)
        vocabulary = int(AutoModelForCausalLM.from_pretrained(model).config.vocab_size)
        for dtype in args.dtypes:
            for path in args.paths:
                print(f"{dtype}, {path}")
                groups, new = (2, 16) if args.tiny else (32, 256)
                bench = Bench(model, device=args.device, dtype=dtype, path=path, sequences=8 * groups)
                check(checks, bench, model, dtype=dtype, vocabulary=vocabulary)
                figures(bench, vocabulary=vocabulary, groups=groups, new=new)
    print(f"{checks.failed} checks failed" if checks.failed else "all checks passed")
    sys.exit(checks.failed > 0)


if __name__ == "__main__":
    main()
