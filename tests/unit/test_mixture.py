"""Several sources of prompts as one: shares, a curriculum, ends, and a position that can be resumed from."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from corrente.config import RunConfig
from corrente.config.load import dump_config, parse_config
from corrente.data.types import Prompt
from corrente.entrypoints.checks import check_config
from corrente.errors import ConfigError
from corrente.prompts.build import build, build_eval
from corrente.prompts.mixture import MixturePrompts, Part
from corrente.testing import samples
from corrente.testing.stages import check_prompts


def encode(text: str) -> list[int]:
    return list(text.encode())


class Numbers:
    """Implements Prompts: 0, 1, ... up to ``end``."""

    def __init__(self, end: int = 1 << 30) -> None:
        self._end, self._at = end, 0

    def next(self) -> Prompt | None:
        if self._at == self._end:
            return None
        self._at += 1
        return self._make(self._at - 1)

    def find(self, ids: Sequence[str]) -> tuple[Prompt, ...]:
        return tuple(self._make(int(name.split("/")[1])) for name in ids)

    def state(self) -> dict[str, Any]:
        return {"at": self._at}

    def restore(self, state: dict[str, Any]) -> None:
        self._at = state["at"]

    def describe(self) -> str:
        return "numbers"

    def _make(self, number: int) -> Prompt:
        return samples.prompt(id=f"0/{number}", tokens=[number], fields={"row": number})


def mixture(*parts: Part, seed: int = 0, length: int = 1000) -> MixturePrompts:
    return MixturePrompts(parts, seed=seed, length=length)


def names(source: MixturePrompts, count: int) -> list[str]:
    drawn = [source.next() for _ in range(count)]
    return [p.id.partition(":")[0] for p in drawn if p is not None]


def test_shares_are_those_of_the_weights():
    source = mixture(Part(name="a", prompts=Numbers(), weight=3.0), Part(name="b", prompts=Numbers(), weight=1.0))
    counts = Counter(names(source, 4000))
    assert counts["a"] / 4000 == pytest.approx(0.75, abs=0.03)


def test_each_source_keeps_its_own_order_and_its_prompts_say_where_they_are_from():
    source = mixture(Part(name="a", prompts=Numbers()), Part(name="b", prompts=Numbers()))
    prompts = [p for p in (source.next() for _ in range(100)) if p is not None]
    for name in "ab":
        rows = [p.fields["row"] for p in prompts if p.id.startswith(f"{name}:")]
        assert rows == list(range(len(rows)))
    assert all(p.fields["source"] == p.id[0] for p in prompts)
    assert len({p.id for p in prompts}) == 100


def test_weights_move_over_the_run_and_then_stay():
    easy = Part(name="easy", prompts=Numbers(), weight=1.0, weight_end=0.0)
    hard = Part(name="hard", prompts=Numbers(), weight=0.0, weight_end=1.0)
    drawn = names(mixture(easy, hard, length=2000), 3000)
    shares = [drawn[at : at + 500].count("hard") / 500 for at in range(0, 3000, 500)]
    assert shares == pytest.approx([0.125, 0.375, 0.625, 0.875, 1.0, 1.0], abs=0.06)
    assert drawn[0] == "easy"


def test_weights_move_as_they_began_to_in_a_run_that_is_resumed_for_more_steps():
    def parts() -> list[Part]:
        ends = {"easy": (1.0, 0.0), "hard": (0.0, 1.0)}
        return [Part(name=n, prompts=Numbers(), weight=a, weight_end=b) for n, (a, b) in ends.items()]

    whole, first, second = mixture(*parts(), length=200), mixture(*parts(), length=200), mixture(*parts(), length=4000)
    before = names(first, 100)
    second.restore(first.state())
    assert before + names(second, 200) == names(whole, 300)


def test_source_that_ends_leaves_its_share_to_the_others_and_the_last_ends_the_mixture():
    source = mixture(
        Part(name="a", prompts=Numbers(5), weight=10.0),
        Part(name="b", prompts=Numbers(20)),
        Part(name="c", prompts=Numbers(20)),
    )
    drawn = names(source, 100)
    assert Counter(drawn) == {"a": 5, "b": 20, "c": 20}
    assert source.next() is None
    assert source.next() is None


def test_source_without_weight_is_drawn_only_when_nothing_else_is_left():
    source = mixture(Part(name="a", prompts=Numbers(3)), Part(name="b", prompts=Numbers(3), weight=0.0))
    assert names(source, 10) == ["a"] * 3 + ["b"] * 3


@pytest.mark.parametrize("end", [7, 1 << 30])
def test_mixture_keeps_the_contract_of_prompts(end: int):
    check_prompts(
        lambda: mixture(
            Part(name="a", prompts=Numbers(end), weight=2.0, weight_end=0.1),
            Part(name="b", prompts=Numbers(end)),
            length=30,
        )
    )


def test_order_depends_on_the_seed():
    def drawn(seed: int) -> list[str]:
        return names(mixture(Part(name="a", prompts=Numbers()), Part(name="b", prompts=Numbers()), seed=seed), 50)

    assert drawn(1) == drawn(1) != drawn(2)


def test_position_of_other_sources_is_refused():
    state = mixture(Part(name="a", prompts=Numbers())).state()
    other = mixture(Part(name="b", prompts=Numbers()))
    with pytest.raises(ConfigError, match="are b, but were a"):
        other.restore(state)
    with pytest.raises(ConfigError, match="no source 'a'"):
        other.find(["a:0/0"])


# ---- from a config -----------------------------------------------------------------------------------------------------------


def rows(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"{path.stem} {n}", "answer": "2"}) + "\n" for n in range(count)))
    return path


def config(*sources: dict[str, Any], **tables: Any) -> RunConfig:
    return parse_config({"prompts": {"kind": "mixture", "sources": list(sources)}, **tables})


def test_config_makes_a_mixture_that_survives_a_dump(tmp_path: Path):
    easy, hard = rows(tmp_path / "easy.jsonl", 6), rows(tmp_path / "hard.jsonl", 6)
    made = config(
        {"kind": "jsonl", "path": str(easy), "weight": 2, "eval_path": str(easy)},
        {"kind": "jsonl", "path": str(hard), "name": "very hard", "weight": 0, "weight_end": 1.0},
        {"kind": "arithmetic", "digits": 2},
        eval={"prompts": 5},
        run={"steps": 4, "prompts_per_step": 5},
    )
    check_config(made)
    import tomllib

    assert parse_config(tomllib.loads(dump_config(made))) == made
    check_prompts(lambda: build(made, encode), most=30)
    source = build(made, encode)
    first = [p for p in (source.next() for _ in range(40)) if p is not None]
    assert {p.fields["source"] for p in first} == {"easy", "very hard", "arithmetic"}
    assert Counter(p.fields["source"] for p in first)["easy"] == 6
    assert [p.id for p in build_eval(made, encode)] == ["easy:eval/0", "easy:eval/1", "arithmetic:eval/0"]
    assert "very hard (weight 0 to 1): 6 rows" in source.describe()


def test_paths_of_sources_are_found_beside_the_config(tmp_path: Path):
    from corrente.config.load import load_config

    rows(tmp_path / "sums.jsonl", 3)
    (tmp_path / "run.toml").write_text(
        '[prompts]\nkind = "mixture"\n[[prompts.sources]]\nkind = "jsonl"\npath = "sums.jsonl"\n'
    )
    made = load_config(tmp_path / "run.toml")
    assert made.prompts.sources[0].path == str(tmp_path / "sums.jsonl")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([], "give at least one"),
        ([{"kind": "arithmetic", "weight": 0}], "with a weight above 0"),
        (
            [{"kind": "arithmetic"}, {"kind": "arithmetic"}],
            r"sources\[1\].name = 'arithmetic': every source needs another",
        ),
        ([{"kind": "arithmetic", "name": "a:b"}], "without colon"),
        ([{"kind": "jsonl", "path": "nowhere.jsonl"}], r"prompts.sources\[0\].path = nowhere.jsonl does not exist"),
        (
            [{"kind": "arithmetic", "weight": -1}],
            r"prompts.sources\[0\].weight = -1: it must be a number of at least 0",
        ),
        ([{"kind": "jsonl"}], r"prompts.sources\[0\].path is missing"),
        ([{"kind": "csv"}], r'sources\[0\].kind = "csv": it must be one of "arithmetic", "jsonl"'),
        ([{"kind": "arithmetic", "wieght": 2}], r"unknown key prompts.sources\[0\].wieght .*: did you mean weight\?"),
        ("easy", "it must be a list of tables"),
    ],
)
def test_wrong_sources_are_refused_in_one_line(sources: Any, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        check_config(parse_config({"prompts": {"kind": "mixture", "sources": sources}}))
    assert "\n" not in str(caught.value)


def test_evaluation_on_sources_of_its_own_replaces_what_the_prompts_hold_out(tmp_path: Path):
    hard, rows = tmp_path / "hard.jsonl", '{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n'
    hard.write_text(rows)
    tables = {
        "prompts": {"kind": "arithmetic"},
        "eval": {
            "prompts": 6,
            "sources": [
                {"kind": "arithmetic", "digits": 2, "name": "two"},
                {"kind": "jsonl", "path": "hard.jsonl"},
            ],
        },
    }
    made = parse_config(tables, beside=tmp_path)
    ids = [prompt.id for prompt in build_eval(made, encode)]
    assert ids == ["two:eval/0", "two:eval/1", "two:eval/2", "hard:eval/0", "hard:eval/1"]
    assert parse_config(tomllib.loads(dump_config(made))) == made
    tables["eval"]["sources"][1]["name"] = "two"
    with pytest.raises(ConfigError, match=r"eval.sources\[1\].name = 'two': every source needs another name"):
        check_config(parse_config(tables, beside=tmp_path))
