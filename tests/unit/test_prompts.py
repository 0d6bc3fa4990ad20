"""Where work comes from: repeatable from a seed, resumable from a position, and held-out sums that are never trained on."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from corrente import config as c
from corrente.common import serialization
from corrente.data.types import Prompt
from corrente.errors import ConfigError
from corrente.prompts.arithmetic import ArithmeticPrompts, held_out_prompts, is_held_out, shots
from corrente.prompts.base import Prompts
from corrente.prompts.build import build, build_eval
from corrente.prompts.seeds import SeedPrompts, held_out_seeds
from corrente.testing.stages import check_prompts


def encode(text: str) -> list[int]:
    return list(text.encode())


def _rows(config: c.Jsonl, *, seed: int = 0) -> Prompts:
    return build(c.RunConfig(run=c.Run(seed=seed), prompts=config), encode)


def _some(prompts: Prompts, count: int) -> list[Prompt]:
    taken = [prompts.next() for _ in range(count)]
    return [p for p in taken if p is not None]


def _pair(prompt: Prompt) -> tuple[int, int]:
    a, _, b, _ = prompt.text.splitlines()[-1].split()
    return int(a), int(b)


def _same(a: Prompt, b: Prompt) -> bool:
    return (a.id, a.text, a.fields, a.tokens.tolist()) == (b.id, b.text, b.fields, b.tokens.tolist())


# ---- arithmetic --------------------------------------------------------------------------------------------------------------


def test_arithmetic_text_is_worked_examples_and_a_sum():
    for prompt in _some(ArithmeticPrompts(c.Arithmetic(), encode, seed=0), 50):
        a, b = _pair(prompt)
        assert prompt.text == f"2 + 3 = 5\n6 + 1 = 7\n{a} + {b} ="
        assert prompt.fields == {"answer": str(a + b)}
        assert 0 <= a <= 9
        assert 0 <= b <= 9
        assert prompt.tokens.tolist() == encode(prompt.text)


def test_arithmetic_digits_and_shots_are_as_configured():
    for prompt in _some(ArithmeticPrompts(c.Arithmetic(digits=2, shots=4), encode, seed=0), 50):
        lines = prompt.text.splitlines()
        assert lines[:2] == ["12 + 34 = 46", "61 + 17 = 78"]
        assert len(lines) == 5
        assert all(10 <= n <= 99 for n in _pair(prompt))
    for line in lines[:-1]:
        left, _, answer = line.partition(" = ")
        a, _, b = left.partition(" + ")
        assert int(a) + int(b) == int(answer)
    assert shots(c.Arithmetic(shots=0)) == ""


def test_arithmetic_depends_on_the_seed_alone():
    one, again, other = (ArithmeticPrompts(c.Arithmetic(digits=3), encode, seed=s) for s in (1, 1, 2))
    texts = [[p.text for p in _some(source, 30)] for source in (one, again, other)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_arithmetic_never_trains_on_a_held_out_sum_in_either_order():
    config = c.Arithmetic(digits=1)
    held_out = {_pair(p) for p in held_out_prompts(config, encode, count=64)}
    trained = {_pair(p) for seed in (0, 1) for p in _some(ArithmeticPrompts(config, encode, seed=seed), 2000)}
    assert held_out
    assert not trained & {pair[::order] for pair in held_out for order in (1, -1)}
    assert len(trained) + len(held_out) == 100
    assert {(2, 3), (6, 1)} <= trained, "worked examples are not held out: their answers are in the prompt"


@pytest.mark.parametrize(("digits", "low", "high"), [(1, 0.15, 0.25), (2, 0.18, 0.22)])
def test_arithmetic_holds_out_about_a_fifth(digits: int, low: float, high: float):
    config = c.Arithmetic(digits=digits)
    numbers = range(10) if digits == 1 else range(10, 100)
    pairs = list(product(numbers, numbers))
    share = sum(is_held_out(pair, config) for pair in pairs) / len(pairs)
    assert low <= share <= high


def test_arithmetic_draws_pairs_evenly():
    pairs = Counter(_pair(p) for p in _some(ArithmeticPrompts(c.Arithmetic(), encode, seed=5), 8100))
    assert len(pairs) == 81
    assert min(pairs.values()) > 60
    assert max(pairs.values()) < 145


def test_arithmetic_evaluation_is_the_same_for_every_seed_and_has_no_repeats():
    configs = [c.RunConfig(run=c.Run(seed=s), prompts=c.Arithmetic(digits=2), eval=c.Eval(prompts=50)) for s in (0, 7)]
    first, second = (build_eval(config, encode) for config in configs)
    assert len(first) == 50
    assert all(map(_same, first, second))
    assert len({_pair(p) for p in first}) == 50
    assert build_eval(c.RunConfig(eval=c.Eval(every=0)), encode) == ()


# ---- seeds -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 3, 65535, 65536, 2**40, 2**64 + 7])
def test_seeds_of_training_are_never_held_out_and_can_be_kept_whatever_the_runs_seed(seed: int):
    held_out = {p.fields["seed"] for p in held_out_seeds(c.Seeds(), encode, count=100)}
    trained = _some(SeedPrompts(c.Seeds(), encode, seed=seed), 100)
    numbers = [p.fields["seed"] for p in trained]
    assert not held_out & set(numbers)
    assert numbers == list(range(numbers[0], numbers[0] + 100))
    assert [serialization.decode(serialization.encode(p), Prompt).fields for p in trained] == [
        p.fields for p in trained
    ]


# ---- jsonl -------------------------------------------------------------------------------------------------------------------


def _file(tmp_path: Path, rows: int = 10) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"né {i}", "answer": i}) for i in range(rows)) + "\n\n")
    return path


def test_jsonl_gives_every_row_once_an_epoch_in_another_order(tmp_path: Path):
    source = _rows(c.Jsonl(path=str(_file(tmp_path)), epochs=2))
    taken = _some(source, 100)
    assert source.next() is None
    assert source.next() is None
    epochs = [[p.fields["answer"] for p in taken[:10]], [p.fields["answer"] for p in taken[10:]]]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1] != list(range(10))
    assert len({p.id for p in taken}) == 20
    for prompt in taken:
        assert prompt.id.endswith(f"/{prompt.fields['answer']}")
        assert prompt.text == f"né {prompt.fields['answer']}"


def test_jsonl_may_begin_with_a_byte_order_mark(tmp_path: Path):
    path = _file(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    source = _rows(c.Jsonl(path=str(path), shuffle=False, epochs=1))
    assert [p.fields["answer"] for p in _some(source, 99)] == list(range(10))


def test_row_that_is_no_prompt_is_met_again_by_whoever_goes_on(tmp_path: Path):
    path = tmp_path / "late.jsonl"
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = _rows(c.Jsonl(path=str(path), shuffle=False, epochs=1))
    assert [p.text for p in _some(source, 1)] == ["a"]
    for _ in range(2):
        with pytest.raises(ConfigError, match="row 0/1 is a conversation"):
            source.next()
    again = _rows(c.Jsonl(path=str(path), shuffle=False, epochs=1))
    again.restore(source.state())
    with pytest.raises(ConfigError, match="row 0/1 is a conversation"):
        again.next()


def test_jsonl_without_shuffle_keeps_the_files_order(tmp_path: Path):
    source = _rows(c.Jsonl(path=str(_file(tmp_path)), shuffle=False, epochs=1), seed=3)
    assert [p.id for p in _some(source, 99)] == [f"0/{i}" for i in range(10)]


def test_jsonl_zero_epochs_never_end(tmp_path: Path):
    source = _rows(c.Jsonl(path=str(_file(tmp_path, rows=3)), epochs=0))
    assert len(_some(source, 50)) == 50


def test_jsonl_order_depends_on_the_seed(tmp_path: Path):
    path = str(_file(tmp_path))
    orders = [[p.id for p in _some(_rows(c.Jsonl(path=path), seed=s), 10)] for s in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_jsonl_refuses_to_resume_in_another_file(tmp_path: Path):
    source = _rows(c.Jsonl(path=str(_file(tmp_path))))
    state = source.state()
    changed = _rows(c.Jsonl(path=str(_file(tmp_path, rows=11))))
    with pytest.raises(ConfigError, match="has 11 rows, but had 10"):
        changed.restore(state)


def test_jsonl_evaluation_is_the_first_rows_of_its_own_file(tmp_path: Path):
    def held_out(count: int, eval_path: str) -> list[str]:
        prompts = c.Jsonl(path="unused", eval_path=eval_path)
        return [p.id for p in build_eval(c.RunConfig(prompts=prompts, eval=c.Eval(prompts=count)), encode)]

    assert held_out(4, str(_file(tmp_path))) == [f"eval/{i}" for i in range(4)]
    assert len(held_out(64, str(_file(tmp_path)))) == 10
    assert held_out(4, "") == []


def test_jsonl_row_without_the_column_is_an_error_that_names_the_row(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n')
    with pytest.raises(
        ConfigError, match=r"prompts.column = 'prompt': row 0/0 of .* has no such column .it has 'question'"
    ):
        _rows(c.Jsonl(path=str(path)))


# ---- both --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["arithmetic", "jsonl"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> c.RunConfig:
    jsonl = c.Jsonl(path=str(_file(tmp_path)), epochs=3)
    return c.RunConfig(prompts=jsonl if request.param == "jsonl" else c.Arithmetic(digits=2))


@pytest.mark.parametrize("before", [0, 1, 9, 10, 11, 29, 30, 31])
def test_restored_position_continues_where_it_stood(config: c.RunConfig, before: int):
    one, other = build(config, encode), build(config, encode)
    for _ in range(before):
        one.next()
    other.restore(json.loads(json.dumps(one.state())))
    rest = [_some(source, 25) for source in (one, other)]
    assert len(rest[0]) == len(rest[1])
    assert all(map(_same, *rest))


def test_find_gives_back_the_same_prompts_in_order(config: c.RunConfig):
    taken = _some(build(config, encode), 25)
    wanted = [taken[i] for i in (20, 3, 11)]
    found = build(config, encode).find([p.id for p in wanted])
    assert all(map(_same, found, wanted))


def test_state_is_small_whatever_was_drawn(config: c.RunConfig):
    source = build(config, encode)
    _some(source, 25)
    assert len(json.dumps(source.state())) < 80
    assert source.describe()


def test_prompts_keep_their_contract(config: c.RunConfig):
    check_prompts(lambda: build(config, encode))


@pytest.mark.slow
def test_tokenizer_adds_the_beginning_of_sequence_once(tmp_path: Path):
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from corrente.prompts.tokenizer import Tokenizer

    backend = Backend(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("a b") == [0, 1, 2]
    assert tokenizer.encode("<s> a b") == [0, 1, 2]
    assert tokenizer.decode(np.array([0, 2, 1])) == "b a"


@pytest.mark.slow
def test_tokenizer_that_is_not_there_is_a_config_error(tmp_path: Path):
    from corrente.prompts.tokenizer import Tokenizer

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"model\.path = .*its tokenizer cannot be loaded"):
        Tokenizer(tmp_path).encode("a")
