"""Models that score: what they answer against a plain forward pass of the same model on one text at a time."""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from tests.numerics.tiny_engine import Served, tiny
from tests.processes import children
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from corrente.config import RunConfig
from corrente.config.load import parse_config
from corrente.data.types import Group, Sampling, Scores
from corrente.errors import ConfigError
from corrente.score import networks
from corrente.score.build import open_scorer
from corrente.score.messages import JudgeSamples, Opinion, Sample
from corrente.score.teacher import TeacherSource, scored_contexts
from corrente.testing import samples
from corrente.trl import trainer_inputs

ALPHABET = "abcdefgh \n=?"
CONTEXT = 48
CHAT = "{% for m in messages %}{{ m.role[0] }}={{ m.content }}\n{% endfor %}"


def tokenizer(folder: Path, *, chat: bool = False, alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """One token a character; pad is eos."""
    vocabulary = {"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(alphabet)}}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    plain.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=plain,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT if chat else None,
    )
    fast.save_pretrained(folder)
    return fast


def write(folder: Path, kind: Any, *, labels: int = 1, chat: bool = False, **changes: Any) -> Any:
    """A random model of ``kind`` with its tokenizer; returns it, to be asked directly."""
    tokenizer(folder, chat=chat)
    torch.manual_seed(len(folder.name))
    shape: dict[str, Any] = {
        "vocab_size": len(ALPHABET) + 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": CONTEXT,
        "pad_token_id": 1,
        "num_labels": labels,
    }
    config = (
        BertConfig(**shape) if kind is BertForSequenceClassification else LlamaConfig(**shape, num_key_value_heads=1)
    )
    for key, value in changes.items():
        setattr(config, key, value)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def ask(respond: networks.Respond, *asked: Sample, top: int = 0) -> list[Opinion]:
    return respond(JudgeSamples(samples=list(asked), top=top))


def ids(text: str) -> list[int]:
    return [ALPHABET.index(c) + 2 for c in text]


PAIRS = [Sample(prompt="ab=", completion="c"), Sample(prompt="a?", completion="hhgfed a"), Sample(completion="b")]


@pytest.mark.parametrize("kind", [LlamaForSequenceClassification, BertForSequenceClassification])
@torch.inference_mode()
def test_reward_is_the_logit_of_each_text_alone_whatever_else_is_in_the_batch(kind: Any, tmp_path: Path):
    model = write(tmp_path, kind)
    respond = networks.reward_model(path=str(tmp_path), dtype="float32", chat=True, label=0)
    expected = [float(model(torch.tensor([ids(p.prompt + p.completion)])).logits[0, 0]) for p in PAIRS]
    assert [o.score for o in ask(respond, *PAIRS)] == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 3


@torch.inference_mode()
def test_text_that_ends_in_the_pad_token_is_judged_at_its_end(tmp_path: Path):
    """Pad is eos here, and a chat ends with it: a classifier that looks for the first pad would stop short of it."""
    model = write(tmp_path, LlamaForSequenceClassification)
    respond = networks.reward_model(path=str(tmp_path), dtype="float32", chat=True, label=0)
    texts = ["ab=c</s>", "ab=cdefgh</s>"]
    expected = []
    for text in texts:
        model.config.pad_token_id = 5000
        expected.append(float(model(torch.tensor([[*ids(text.removesuffix("</s>")), 1]])).logits[0, 0]))
    found = [o.score for o in ask(respond, *(Sample(prompt=text) for text in texts))]
    assert found == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def test_texts_that_leave_no_token_to_pad_with_are_judged_one_by_one(tmp_path: Path):
    model = write(tmp_path, LlamaForSequenceClassification)
    respond = networks.reward_model(path=str(tmp_path), dtype="float32", chat=False, label=0)
    texts = ["<s></s>" + ALPHABET, "ab"]
    model.config.pad_token_id = 5000
    expected = [float(model(torch.tensor([text])).logits[0, 0]) for text in ([0, 1, *ids(ALPHABET)], ids("ab"))]
    assert [o.score for o in ask(respond, *(Sample(prompt=t) for t in texts))] == pytest.approx(expected, abs=1e-5)


@torch.inference_mode()
def test_given_renders_what_is_a_conversation_and_joins_text_without_special_tokens(tmp_path: Path):
    model = write(tmp_path, LlamaForSequenceClassification, chat=True)
    own = tokenizer(tmp_path, chat=True)
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 0)]
    )
    own.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "cd"}]
    samples = [Sample(prompt="b", completion="cd", messages=messages), Sample(prompt="b ", completion="cd")]
    rendered = [0, *ids("=b\n"), *ids("a=cd\n")]  # "u", of user, is not in the alphabet
    respond = networks.reward_model(path=str(tmp_path), dtype="float32", chat="given", label=0)
    expected = [float(model(torch.tensor([text])).logits[0, 0]) for text in (rendered, ids("b cd"))]
    assert [o.score for o in ask(respond, *samples)] == pytest.approx(expected, abs=1e-5)


def test_reward_model_that_is_named_gets_the_tokenizer_that_is_given(tmp_path: Path):
    folder, output = tmp_path / "judge", tmp_path / "out"
    folder.mkdir()
    write(folder, LlamaForSequenceClassification)
    given = tokenizer(tmp_path / "given", chat=True)
    (found,) = trainer_inputs.rewards(str(folder), given, None, trainer_inputs.ModelFolder(output)).scorers
    assert (found["chat"], found["name"]) == ("given", "judge")
    assert AutoTokenizer.from_pretrained(found["path"]).chat_template == CHAT
    assert not AutoTokenizer.from_pretrained(folder).chat_template
    assert (Path(found["path"]) / "model.safetensors").samefile(folder / "model.safetensors")
    (plain,) = trainer_inputs.rewards(str(folder), None, None, trainer_inputs.ModelFolder(output)).scorers
    assert plain["path"] == str(folder)


@torch.inference_mode()
def test_chat_template_renders_prompt_and_completion_as_messages(tmp_path: Path):
    model = write(tmp_path, LlamaForSequenceClassification, chat=True)
    sample = Sample(prompt="b c", completion="d")
    rendered = [*ids(" "), *ids("=b c\n"), *ids("a=d\n")]
    rendered[0] = 0  # "u", of user, is not in the alphabet
    for chat, text in ((True, rendered), (False, ids("b cd"))):
        respond = networks.reward_model(path=str(tmp_path), dtype="float32", chat=chat, label=0)
        expected = float(model(torch.tensor([text])).logits[0, 0])
        assert [o.score for o in ask(respond, sample)] == pytest.approx([expected], abs=1e-5)


@torch.inference_mode()
def test_label_says_which_logit_is_the_reward(tmp_path: Path):
    model = write(tmp_path, LlamaForSequenceClassification, labels=3)
    respond = networks.reward_model(path=str(tmp_path), dtype="float32", chat=False, label=2)
    expected = float(model(torch.tensor([ids("ab")])).logits[0, 2])
    assert [o.score for o in ask(respond, Sample(prompt="ab"))] == pytest.approx([expected], abs=1e-5)
    with pytest.raises(ConfigError, match="label = 3"):
        networks.reward_model(path=str(tmp_path), dtype="float32", chat=False, label=3)


def test_text_longer_than_the_model_reads_is_refused_and_its_neighbours_are_judged(tmp_path: Path):
    write(tmp_path, LlamaForSequenceClassification)
    respond = networks.reward_model(path=str(tmp_path), dtype="float32", chat=False, label=0)
    fine, long, empty = ask(respond, Sample(prompt="ab"), Sample(prompt="a" * (CONTEXT + 1)), Sample())
    assert fine.score is not None
    assert long.error == f"{CONTEXT + 1} tokens, and the model reads at most {CONTEXT}"
    assert "nothing to judge" in empty.error


def test_model_without_a_trained_head_is_refused(tmp_path: Path):
    write(tmp_path, LlamaForCausalLM)
    with pytest.raises(ConfigError, match=r"no weights for score\.weight"):
        networks.reward_model(path=str(tmp_path), dtype="float32", chat=False, label=0)
    with pytest.raises(ConfigError, match="not a directory"):
        networks.reward_model(path=str(tmp_path / "nothing"), dtype="float32", chat=False, label=0)


# ---- process rewards ---------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_step_is_scored_where_its_separator_ends_and_lies_on_its_own_tokens(tmp_path: Path):
    model = write(tmp_path, LlamaForTokenClassification, labels=2)
    respond = networks.process_model(
        path=str(tmp_path), dtype="float32", tokenizer=str(tmp_path), delimiter=r"\n+", separator="?", label=1
    )
    text = "ab\n\nc d\nefg"
    (opinion, other) = ask(
        respond,
        Sample(prompt="=", completion=text, tokens=[*ids(text), 1]),
        Sample(prompt="=", completion="a", tokens=ids("a")),
    )
    read = [0, *ids("=ab?c d?efg?")]
    good = model(torch.tensor([read])).logits.softmax(-1)[0, :, 1]
    ends = [at for at, token in enumerate(read) if token == ids("?")[0]]
    assert [s.score for s in opinion.steps] == pytest.approx([float(good[at]) for at in ends], abs=1e-5)
    assert [(s.start, s.stop) for s in opinion.steps] == [(0, 4), (4, 8), (8, 12)]
    assert [(s.start, s.stop) for s in other.steps] == [(0, 1)]


def test_pieces_are_what_the_delimiter_leaves_without_blanks():
    def pieces(text: str) -> list[str]:
        return [text[a:b] for a, b in networks.split_steps(text, r"\n\n")]

    assert pieces("one\n\ntwo\nstill two\n\n") == ["one", "two\nstill two"]
    assert pieces("\n\n \n\nx") == ["x"]
    assert pieces("x") == ["x"]
    assert pieces(" ") == []


def test_spans_of_pieces_cover_all_tokens_also_where_tokens_cross_borders():
    words = {0: "one", 1: " st", 2: "ep\n", 3: "\ntwo", 4: " more", 5: ""}

    def decode(tokens: list[int]) -> str:
        return "".join(words[t] for t in tokens)

    tokens = [0, 1, 2, 3, 4, 5]
    text = decode(tokens)
    pieces = networks.split_steps(text, r"\n+")
    assert [text[a:b] for a, b in pieces] == ["one step", "two more"]
    assert networks.token_spans(tokens, pieces, decode) == [(0, 3), (3, 6)]
    assert networks.token_spans([], [], decode) == []


# ---- teachers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.inference_mode()
def test_teacher_scores_each_token_given_all_before_it(temperature: float, tmp_path: Path):
    model = write(tmp_path, LlamaForCausalLM)
    respond = networks.teacher(path=str(tmp_path), dtype="float32", tokenizer="", temperature=temperature)
    texts = [ids("ab=cde"), ids("h?")]
    opinions = ask(respond, *(Sample(tokens=text) for text in texts), top=3)
    for text, opinion in zip(texts, opinions, strict=True):
        logprobs = (model(torch.tensor([text])).logits[0].double() / temperature).log_softmax(-1)
        expected = [float(logprobs[at, token]) for at, token in enumerate(text[1:])]
        assert opinion.logprobs == pytest.approx(expected, abs=1e-5)
        for at, (numbers, values) in enumerate(zip(opinion.top_ids, opinion.top_logprobs, strict=True)):
            order = logprobs[at].argsort(descending=True)[:3].tolist()
            assert numbers == order
            assert values == pytest.approx([float(logprobs[at, token]) for token in order], abs=1e-5)


class Held:
    """An engine core as a teacher: calls it here and now."""

    def __init__(self, served: Served) -> None:
        self._core = served.core

    async def score(self, tokens: Any, *, top: int = 0) -> Scores:
        return self._core.score(tokens, top)


def test_policy_that_teaches_itself_says_what_it_said():
    """An engine as the teacher of what it sampled, untempered: the log-probs of sampling and of teaching agree."""
    path, model, other = tiny("llama")
    prompt = np.array([3, 50, 7], np.int32)
    (answer,) = Served(path, model).run([prompt], Sampling(max_tokens=12))
    group = samples.group(episodes=[samples.episode(turns=[prompt, answer])])
    (mark,) = anyio.run(TeacherSource(Held(Served(path, model)), top=1).score_episodes, group)
    (taught,) = mark.taught
    assert taught.logprobs.tolist() == pytest.approx(answer.logprobs.tolist(), abs=1e-4)
    (mark,) = anyio.run(TeacherSource(Held(Served(path, other))).score_episodes, group)
    assert abs(mark.taught[0].logprobs - answer.logprobs).max() > 0.1


def test_teacher_that_reads_other_tokens_is_refused(tmp_path: Path):
    (tmp_path / "policy").mkdir()
    write(tmp_path, LlamaForCausalLM)
    tokenizer(tmp_path / "policy", alphabet=ALPHABET[::-1])
    with pytest.raises(ConfigError, match="does not read the policy's tokens"):
        networks.teacher(path=str(tmp_path), dtype="float32", tokenizer=str(tmp_path / "policy"))


def test_teacher_that_ends_its_texts_otherwise_is_refused(tmp_path: Path):
    (tmp_path / "policy").mkdir()
    tokenizer(tmp_path)  # and no model: what it reads is compared before weights are looked for
    other = tokenizer(tmp_path / "policy")
    other.eos_token = "?"
    other.save_pretrained(tmp_path / "policy")
    with pytest.raises(ConfigError, match=r"its eos_token is '</s>', the policy's '\?'"):
        networks.teacher(path=str(tmp_path), dtype="float32", tokenizer=str(tmp_path / "policy"))


class Counting:
    """A teacher whose log-prob of a token is minus its position in the context."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    async def score(self, tokens: Any, *, top: int = 0) -> Scores:
        self.asked.append(tokens.tolist())
        count = len(tokens) - 1
        place = np.arange(1, count + 1, dtype=np.float32)
        return Scores(
            logprobs=-place,
            top_ids=np.tile(tokens[1:, None], (1, top)).astype(np.int32),
            top_logprobs=np.tile(-place[:, None], (1, top)),
        )


def test_every_sampled_turn_of_a_conversation_is_taught_once_and_aligned():
    """user, policy, tool, then two ends: another policy turn after it, and one that forks from the first answer."""
    turns = [
        samples.turn((1, 2)),
        samples.completion(text="xyz"),
        samples.turn((7,), speaker="tool"),
        samples.completion(text="ab"),
        samples.turn(samples.completion(text="c"), parent=1),
    ]
    teacher = Counting()
    played = samples.episode(turns=turns)
    group = samples.group(episodes=[played])
    (mark,) = anyio.run(TeacherSource(teacher, name="t", top=2).score_episodes, group)
    assert teacher.asked == [[1, 2, 0, 1, 2, 7, 0, 1], [1, 2, 0, 1, 2, 0]]
    taught = {t.turn: t for t in mark.taught}
    assert {turn: t.logprobs.tolist() for turn, t in taught.items()} == {1: [-2, -3, -4], 3: [-6, -7], 4: [-5]}
    assert taught[3].top_ids.tolist() == [[0, 0], [1, 1]]
    assert mark.score is None
    assert sum(len(places) for _, places in scored_contexts(played)) == 3


# ---- all of it in processes --------------------------------------------------------------------------------------------------


def open_and_score(config: RunConfig, *groups: Group) -> tuple[list[Group], dict[str, float]]:
    async def main() -> tuple[list[Group], dict[str, float]]:
        scored: dict[int, Group] = {}
        async with open_scorer(config) as scorer:

            async def one(group: Group) -> None:
                scored[group.id] = await scorer.score(group)

            async with anyio.create_task_group() as tasks:
                for group in groups:
                    tasks.start_soon(one, group)
            return [scored[group.id] for group in groups], scorer.stats()

    return run(main)


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    return anyio.run(main)


def grouped(number: int, texts: Sequence[str]) -> Group:
    prompt = samples.prompt(tokens=ids("ab="), text="ab=", fields={"answer": "c"})
    answers = [samples.completion(tokens=ids(text), text=text) for text in texts]
    episodes = [samples.episode(index=at, turns=[prompt.tokens, answer]) for at, answer in enumerate(answers)]
    return samples.group(id=number, prompt=prompt, episodes=episodes)


@pytest.mark.slow
@torch.inference_mode()
def test_models_score_beside_functions_each_in_a_process_of_its_own(tmp_path: Path):
    folders = {name: tmp_path / name for name in ("outcome", "steps", "wise", "policy")}
    for folder in folders.values():
        folder.mkdir()
    outcome = write(folders["outcome"], LlamaForSequenceClassification)
    steps = write(folders["steps"], LlamaForTokenClassification, labels=2)
    wise = write(folders["wise"], LlamaForCausalLM)
    write(folders["policy"], LlamaForCausalLM)
    config = parse_config(
        {
            "model": {"path": str(folders["policy"])},
            "reward": {
                "functions": ["exact_line"],
                "scorers": [
                    {"kind": "reward_model", "path": str(folders["outcome"]), "weight": 2.0},
                    {"kind": "process_reward", "path": str(folders["steps"]), "weight": 0.5, "aggregate": "mean"},
                    {"kind": "teacher", "path": str(folders["wise"]), "top": 2},
                ],
            },
        }
    )
    texts = ("c", "d\ne", "a\nb\ng")
    groups, stats = open_and_score(config, *(grouped(number, texts) for number in range(4)))
    for group in groups:
        for text, scored in zip(texts, group.episodes, strict=True):
            assert scored.status == "ok", scored.error
            logit = float(outcome(torch.tensor([ids("ab=" + text)])).logits[0, 0])
            read = [0, *ids("ab="), *(token for step in text.split("\n") for token in ids(step + "\n"))]
            good = steps(torch.tensor([read])).logits.softmax(-1)[0, :, 1]
            per_step = [float(good[at]) for at, token in enumerate(read) if token == ids("\n")[0]]
            mean = sum(per_step) / len(per_step)
            exact = float(text == "c")
            assert scored.scores == pytest.approx(
                {"exact_line": exact, "outcome": logit, "steps": mean, "wise": None}, abs=1e-4
            )
            assert scored.reward == pytest.approx(exact + 2 * logit + 0.5 * mean, abs=1e-4)
            assert [s.score for s in scored.step_scores] == pytest.approx([0.5 * s for s in per_step], abs=1e-4)
            assert (scored.step_scores[0].turn, scored.step_scores[0].start) == (1, 0)
            assert scored.step_scores[-1].stop == len(text)
            logprobs = wise(torch.tensor([ids("ab=" + text)])).logits[0].log_softmax(-1)
            expected = [float(logprobs[2 + at, token]) for at, token in enumerate(ids(text))]
            (taught,) = scored.taught
            assert taught.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
            assert taught.top_ids.shape == (len(text), 2)
    assert stats["score/outcome_calls"] == 12
    assert stats["score/outcome_failed"] == 0
    assert not math.isnan(stats["score/wise_latency_p95_s"])


@pytest.mark.slow
def test_model_process_that_dies_costs_one_batch_and_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, LlamaForSequenceClassification)
    reward = {"scorers": [{"kind": "reward_model", "path": str(tmp_path), "name": "rm"}]}
    config = parse_config({"model": {"path": str(tmp_path)}, "reward": reward})

    async def main() -> None:
        before = children()
        async with open_scorer(config) as scorer:
            first = await scorer.score(grouped(0, ["a", "b"]))
            (process,) = children() - before
            os.kill(process, signal.SIGKILL)
            second = await scorer.score(grouped(1, ["a"]))
            third = await scorer.score(grouped(2, ["a", "b"]))
        assert [e.status for e in first.episodes] == ["ok", "ok"]
        (lost,) = second.episodes
        assert lost.status == "failed"
        assert re.match(r"rm: scorer-rm \(pid \d+\) was killed by SIGKILL", lost.error), lost.error
        assert [e.reward for e in third.episodes] == [e.reward for e in first.episodes]

    anyio.run(main)


@pytest.mark.slow
def test_model_that_cannot_be_loaded_is_a_wrong_setting(tmp_path: Path):
    write(tmp_path, LlamaForCausalLM)
    reward = {"scorers": [{"kind": "reward_model", "path": str(tmp_path)}]}
    config = parse_config({"model": {"path": str(tmp_path)}, "reward": reward})
    with pytest.raises(ExceptionGroup) as caught:
        open_and_score(config, grouped(0, ["a"]))
    inner: BaseException = caught.value
    while isinstance(inner, BaseExceptionGroup):
        (inner,) = inner.exceptions
    assert isinstance(inner, ConfigError)
    assert "no weights for score.weight" in str(inner)
