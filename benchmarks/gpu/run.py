"""Whole runs of `corrente run` on one accelerator, by each way that weights can take to an engine there.

    python benchmarks/gpu/run.py                            on cuda
    python benchmarks/gpu/run.py --device cpu --only inline shm     the script itself, anywhere

Each is three steps of a tiny random model, with model.device as given: it must end well, and engine and learner must agree about
tokens of the same weights, which they do not where a version did not arrive whole. The last leaves device and dtype to corrente.
Exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefgh\n"
STEPS = 3
PATIENCE_S = 180
GAP = {"float32": 1e-4, "auto": 5e-2}
"""Largest mean |engine - learner| log-prob at equal weights and fresh keys, by model.dtype."""
RUNS: dict[str, tuple[str, ...]] = {
    "inline": ("runtime.kind=inline",),
    "shm": (),
    "disk": ("sync.kind=disk",),
    "delta": ("sync.kind=disk", "sync.payload=delta"),
    "http": ("sync.kind=http",),
    "collective": ("sync.kind=collective",),
    "cuda_ipc": ("sync.kind=cuda_ipc",),
    "replicas": ("pool.replicas=2",),
    "lora": ("adapters.kind=lora", "adapters.targets=all-linear"),
    "auto": ("model.device=auto", "model.dtype=auto"),
}
NEEDS = {"http": "uvicorn", "lora": "peft"}


def letters(completions: list[str], **_: Any) -> list[float]:
    """The reward: which part of a completion is the letter a."""
    return [text.count("a") / max(1, len(text)) for text in completions]


def write(folder: Path) -> None:
    """A random model that reads and writes single letters, and prompts for it."""
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: at + 2 for at, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    rows = [{"prompt": a + b + c} for a in "abcdefgh" for b in "abcdefgh" for c in "abcdefgh"]
    (folder / "config.toml").touch()  # all is said on the command line
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, name: str, device: str) -> str:
    """What is wrong with one run; empty when all is well."""
    settings = {
        "run.name": name,
        "run.dir": folder / "runs",
        "run.steps": STEPS,
        "run.prompts_per_step": 4,
        "run.group_size": 8,
        "model.path": folder / "model",
        "model.device": device,
        "model.dtype": "float32",
        "prompts.kind": "jsonl",
        "prompts.path": folder / "prompts.jsonl",
        "reward.functions": [f"{Path(__file__).absolute()}:letters"],
        "sampling.max_tokens": 32,
        "learner.lr": 0.01,
        "filter.zero_variance": "keep",
        "eval.every": 0,
    }
    for override in RUNS[name]:
        key, _, value = override.partition("=")
        settings[key] = [value] if key == "adapters.targets" else value
    sets = [f"--set={key}={json.dumps(v) if isinstance(v, list) else v}" for key, v in settings.items()]
    command = [sys.executable, "-c", "from corrente.cli.main import main; main()", "run", folder / "config.toml", *sets]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {PATIENCE_S} s"
    if done.returncode:
        return f"exit code {done.returncode}: {done.stderr.strip()[-500:]}"
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    gaps = [gap for line in lines if (gap := json.loads(line).get("mismatch_clean/logprob_gap_mean")) is not None]
    limit = GAP[str(settings["model.dtype"])]
    if not gaps or max(gaps) > limit:
        return f"engine and learner differ by {max(gaps, default=None)} nats, at most {limit:g} is allowed"
    print(f"  ok     {name:12}{max(gaps):.2e} nats between engine and learner (at most {limit:g})", flush=True)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS))
    args = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write(folder)
        for name in args.only:
            if (needed := NEEDS.get(name)) and find_spec(needed) is None:
                print(f"  left   {name:12}there is no {needed}")
                continue
            if wrong := run(folder, name, args.device):
                failed += 1
                print(f"  FAILED {name:12}{wrong}", flush=True)
    print(f"{failed} runs failed" if failed else "all runs passed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
