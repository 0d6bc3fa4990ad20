"""What becomes of requests: shared prefills, retirement in any order, budgets, stops, aborts, seeds."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.numerics.engine_tiny import CONTEXT, VOCABULARY, Served, spell, tiny
from transformers import AutoTokenizer

from corrente.data.types import Completion, Sampling
from corrente.engine.embedded.core import EmbeddedCore
from corrente.engine.embedded.stop import StopStrings
from corrente.errors import GenerationError
from corrente.testing import samples

PROMPT = np.arange(20, 50, dtype=np.int32)


def serve(kind: str = "llama", **options: Any) -> Served:
    where, model, _ = tiny(kind)
    return Served(where, model, **options)


def prefilled(served: Served) -> int:
    return served.core.stats().prefill_tokens


# ---- prefill ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_prompt_of_a_group_is_computed_once(kind: str):
    served = serve(kind)
    done = served.run([PROMPT] * 8, Sampling(max_tokens=5))
    assert prefilled(served) == len(PROMPT)
    assert len({tuple(c.tokens.tolist()) for c in done}) > 1


def test_late_member_of_a_group_costs_one_token():
    served = serve()
    served.submit(PROMPT, Sampling(max_tokens=30), name="first")
    served.core.step()
    served.submit(PROMPT, Sampling(max_tokens=10), name="late", seed=5)
    late = served.finish()["late"]
    assert prefilled(served) == len(PROMPT) + 1
    assert late.tokens.tolist() == _alone(PROMPT, Sampling(max_tokens=10), seed=5).tokens.tolist()


def test_prompts_with_a_common_beginning_compute_it_once():
    served = serve()
    prompts = [np.concatenate([PROMPT, [300 + at, 400]]).astype(np.int32) for at in range(4)]
    done = served.run(prompts, Sampling(max_tokens=6))
    assert prefilled(served) == len(PROMPT) + 4 * 2
    for at, completion in enumerate(done):
        assert completion.tokens.tolist() == _alone(prompts[at], Sampling(max_tokens=6), seed=at).tokens.tolist()


def test_prompt_that_goes_on_from_a_live_sequence_computes_the_rest():
    served = serve()
    served.submit(PROMPT, Sampling(max_tokens=40), name="live")
    served.core.step()
    longer = np.concatenate([PROMPT, [7, 8, 9]]).astype(np.int32)
    before = prefilled(served)
    served.submit(longer, Sampling(max_tokens=6), name="next", seed=1)
    done = served.finish()["next"]
    assert prefilled(served) - before == 3
    assert done.tokens.tolist() == _alone(longer, Sampling(max_tokens=6), seed=1).tokens.tolist()


def test_long_prefill_in_chunks_equals_one_in_a_piece(monkeypatch: pytest.MonkeyPatch):
    whole = serve().run([PROMPT, PROMPT[:17]], Sampling(max_tokens=6))
    monkeypatch.setattr("corrente.engine.embedded.prefill.CHUNK", 7)
    pieces = serve().run([PROMPT, PROMPT[:17]], Sampling(max_tokens=6))
    assert [c.tokens.tolist() for c in whole] == [c.tokens.tolist() for c in pieces]


def _alone(tokens: np.ndarray, sampling: Sampling, *, seed: int) -> Completion:
    served = serve()
    served.submit(tokens, sampling, seed=seed)
    return served.finish()["r"]


# ---- batches -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_sequences_of_any_length_equal_themselves_alone(kind: str):
    """More requests than rows, with lengths that make rows retire and be reused in every order."""
    served = serve(kind, max_sequences=5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, VOCABULARY, rng.integers(1, 30)).astype(np.int32) for _ in range(24)]
    budgets = [int(rng.integers(1, 40)) for _ in prompts]
    for at, (tokens, budget) in enumerate(zip(prompts, budgets, strict=True)):
        served.submit(tokens, Sampling(max_tokens=budget), name=str(at), seed=at)
    done = served.finish()
    lone = serve(kind)
    for at, (tokens, budget) in enumerate(zip(prompts, budgets, strict=True)):
        lone.submit(tokens, Sampling(max_tokens=budget), seed=at)
        alone = lone.finish()["r"]
        assert done[str(at)].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(done[str(at)].logprobs, alone.logprobs, atol=1e-4)


def test_seeds_repeat_and_differ():
    samples = [
        [c.tokens.tolist() for c in serve().run([PROMPT] * 6, Sampling(max_tokens=12, top_p=0.95))] for _ in range(2)
    ]
    assert samples[0] == samples[1]
    assert len({tuple(tokens) for tokens in samples[0]}) == 6


def test_stats_count_what_was_done():
    served = serve(max_sequences=2)
    for at in range(3):
        served.submit(PROMPT, Sampling(max_tokens=4), name=str(at), seed=at)
    assert (served.core.stats().running, served.core.stats().waiting, served.core.idle) == (0, 3, False)
    served.core.step()
    assert (served.core.stats().running, served.core.stats().waiting) == (2, 1)
    done = served.finish()
    stats = served.core.stats()
    assert (stats.running, stats.waiting, stats.version, served.core.idle) == (0, 0, 0, True)
    assert stats.decode_tokens == sum(len(c.tokens) for c in done.values())
    assert stats.busy_s > 0


# ---- ends ----------------------------------------------------------------------------------------------------------------


def test_end_of_sequence_and_stop_ids_end_a_completion_and_are_its_last_token():
    (free,) = serve().run([PROMPT], Sampling(max_tokens=10, temperature=0))
    stop = int(free.tokens[4])
    first = free.tokens.tolist().index(stop)
    (stopped,) = serve().run([PROMPT], Sampling(max_tokens=10, temperature=0, stop_token_ids=(stop,)))
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.finish_reason == "stop"
    assert (free.finish_reason, len(free.tokens)) == ("length", 10)


def test_end_ids_come_from_the_generation_config(tmp_path: Path):
    where, model, _ = tiny("llama")
    (free,) = Served(where, model).run([PROMPT], Sampling(max_tokens=10, temperature=0))
    model.config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, int(free.tokens[3])]}))
    (stopped,) = Served(tmp_path, model).run([PROMPT], Sampling(max_tokens=10, temperature=0))
    assert (stopped.finish_reason, int(stopped.tokens[-1])) == ("stop", int(free.tokens[3]))


def test_budget_is_clipped_to_the_context():
    served = serve()
    long = np.resize(PROMPT, CONTEXT - 3)
    (done,) = served.run([long], Sampling(max_tokens=500))
    assert (len(done.tokens), done.finish_reason) == (3, "length")


def test_budget_of_nothing_is_an_empty_completion():
    (done,) = serve().run([PROMPT], Sampling(max_tokens=0))
    assert (len(done.tokens), done.spans, done.finish_reason) == (0, (), "length")


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.resize(PROMPT, CONTEXT), "no room"),
        (np.empty(0, np.int32), "empty"),
        (np.array([3, VOCABULARY], np.int32), "token ids"),
        (np.array([-1], np.int32), "token ids"),
    ],
)
def test_prompt_that_cannot_be_served_is_refused(tokens: np.ndarray, message: str):
    served = serve()
    with pytest.raises(GenerationError, match=message):
        served.submit(tokens, Sampling())
    assert served.core.idle


def test_request_before_weights_or_with_a_used_id_is_refused():
    where, model, _ = tiny("llama")
    request = samples.request(id="a", tokens=PROMPT, max_tokens=2)
    with pytest.raises(GenerationError, match="no weights"):
        EmbeddedCore(model=where).submit(request)
    served = Served(where, model)
    served.core.submit(request)
    with pytest.raises(GenerationError, match="equal id"):
        served.core.submit(request)
    served.finish()
    served.core.submit(request)
    served.finish()


def test_abort_returns_partials_of_live_and_waiting_requests():
    served = serve(max_sequences=2)
    for at in range(4):
        served.submit(PROMPT, Sampling(max_tokens=20), name=str(at), seed=at)
    served.core.step()
    served.core.abort(["0", "3", "nobody"])
    done = {name: outcome for name, outcome in served.core.step() if isinstance(outcome, Completion)}
    assert {name: (c.finish_reason, len(c.tokens)) for name, c in done.items()} == {
        "0": ("abort", 2),
        "3": ("abort", 0),
    }
    rest = served.finish()
    for name in ("1", "2"):
        alone = _alone(PROMPT, Sampling(max_tokens=20), seed=int(name))
        assert rest[name].tokens.tolist() == alone.tokens.tolist()


# ---- stop strings --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return spell(tmp_path_factory.mktemp("spelled"))


def test_stop_string_ends_a_completion_across_token_borders(spelled: tuple[Path, Any]):
    sampling = Sampling(max_tokens=12, temperature=0)
    (free,) = Served(*spelled).run([PROMPT], sampling)
    assert len(free.text) == 24
    across = free.text[7:9]
    at = free.text.index(across)
    (stopped,) = Served(*spelled).run([PROMPT], msgspec.structs.replace(sampling, stop=("zzzz", across)))
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[:at]
    assert stopped.tokens.tolist() == free.tokens[: -(-(at + 2) // 2)].tolist()


def test_text_excludes_the_stop_token(spelled: tuple[Path, Any]):
    sampling = Sampling(max_tokens=12, temperature=0)
    (free,) = Served(*spelled).run([PROMPT], sampling)
    stop = int(free.tokens[5])
    (done,) = Served(*spelled).run([PROMPT], msgspec.structs.replace(sampling, stop_token_ids=(stop,)))
    assert done.text == free.text[: 2 * (len(done.tokens) - 1)]


@pytest.mark.parametrize("told", ["the tokenizer's end of sequence", "a stop string"])
def test_special_token_ends_a_completion_though_no_text_shows_it(spelled: tuple[Path, Any], tmp_path: Path, told: str):
    sampling = Sampling(max_tokens=12, temperature=0)
    (free,) = Served(*spelled).run([PROMPT], sampling)
    tokenizer = AutoTokenizer.from_pretrained(spelled[0])
    sign = tokenizer.convert_ids_to_tokens([int(free.tokens[5])])[0]
    if told == "a stop string":
        tokenizer.add_special_tokens({"additional_special_tokens": [sign]})
        sampling = msgspec.structs.replace(sampling, stop=(sign,))
    else:
        tokenizer.eos_token = sign
    shutil.copytree(spelled[0], tmp_path / "special")
    tokenizer.save_pretrained(tmp_path / "special")
    (done,) = Served(tmp_path / "special", spelled[1]).run([PROMPT], sampling)
    first = free.tokens.tolist().index(int(free.tokens[5]))
    assert (done.finish_reason, done.tokens.tolist()) == ("stop", free.tokens[: first + 1].tolist())
    assert done.text == free.text[: 2 * first]


def test_end_ids_come_from_the_model_where_the_generation_config_has_none(tmp_path: Path):
    where, model, _ = tiny("llama")
    (free,) = Served(where, model).run([PROMPT], Sampling(max_tokens=10, temperature=0))
    config = copy.deepcopy(model.config)
    config.eos_token_id = int(free.tokens[3])
    config.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))
    (stopped,) = Served(tmp_path, model).run([PROMPT], Sampling(max_tokens=10, temperature=0))
    assert (stopped.finish_reason, int(stopped.tokens[-1])) == ("stop", int(free.tokens[3]))


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(GenerationError, match="tokenizer"):
        serve().submit(PROMPT, Sampling(stop=("x",)))


def _bytes_decoder(ids: Any) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def _pushes(text: str, *stops: str) -> int | None:
    """After how many one-byte tokens a stop string was noticed."""
    watch = StopStrings(stops, _bytes_decoder)
    for at, byte in enumerate(text.encode(), start=1):
        if watch.push(byte):
            return at
    return None


def test_stop_strings_are_found_at_their_last_byte():
    assert _pushes("one two three", "two", "three") == 7
    assert _pushes("aaab", "aab") == 4
    assert _pushes("naïve ∑ x", "∑") == len("naïve ∑".encode())
    assert _pushes("nothing here", "xyz") is None
    assert _pushes("abc", "") is None
