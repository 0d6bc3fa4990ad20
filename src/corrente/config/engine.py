"""The model and the engines that serve it."""

from __future__ import annotations

from typing import Literal

from corrente.config.section import Kind, Natural, Positive, Seconds, Section


class Model(Section, frozen=True, kw_only=True):
    path: str = "smollm2-135m-instruct"
    """A directory with a Hugging Face causal LM, or a name `corrente fetch` knows."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Of learner and embedded engines. auto: a GPU where torch finds one. cuda: refused where it finds none."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    keep_routing: bool | None = None
    """Of a mixture of experts: record which experts each token was sent to, and have the learner send it there too. None: where
    the engine can say; true: refused where it cannot."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, and with models that score. Off: what needs such code is refused."""


class Embedded(Kind, frozen=True, kw_only=True, tag="embedded"):
    """Any Hugging Face causal LM in this process or a child, continuous batching, in-flight weight updates."""

    max_sequences: Positive = 64
    """Sequences decoded at once."""
    max_context: Natural = 0
    """Tokens of prompt and completion together; 0: what the model allows, at most 4096."""
    path: Literal["auto", "lean", "hf"] = "auto"
    """lean: fused forward for the Llama family; hf: the unmodified model; auto: lean where it applies."""


class Vllm(Kind, frozen=True, kw_only=True, tag="vllm"):
    """A vLLM server: launched with the interpreter of an environment that has vllm, or attached to where one runs."""

    python: str = ""
    """Interpreter that has vllm; empty: the one `corrente doctor` finds, if no urls are given."""
    urls: tuple[str, ...] = ()
    """Servers that run already; each becomes a replica. Empty: launch pool.replicas of them."""
    token: str = ""
    """Bearer token; empty: what the environment variable CORRENTE_VLLM_TOKEN says, else none (a launched server gets one)."""
    verify: bool | str = True
    """TLS certificates: true, false, or the path of a bundle to check them against."""
    max_sequences: Positive = 64
    """Sequences decoded at once, of a launched server."""
    max_context: Natural = 0
    """Tokens of prompt and completion together; 0: what the model allows, at most 4096."""
    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`, for a launched server."""
    retries: Natural = 5
    """Attempts after a lost connection or a 5xx, until request_deadline_s; a 4xx fails at once."""
    request_deadline_s: Seconds = 600.0
    """Of one request, its retries included."""
    start_deadline_s: Seconds = 600.0
    """Time a server gets until it answers, launched or attached to."""
    prefix_cache: Literal["salt", "reset"] = "salt"
    """What keeps keys of old weights from new requests: a salt per version, or a reset at every flip, of live requests' too."""


class Pool(Section, frozen=True, kw_only=True):
    """Replicas of the engine behind one."""

    replicas: Positive = 1
    """Engines at the start; each is a process of its own."""
    restarts: Natural = 3
    """Times in a run that a replica which died is replaced; past it the others go on, and the run ends with the last."""
    join: bool = False
    """Let `corrente engine --join` add engines of this host to a run."""
