"""Config files and overrides: what is accepted, and that every fault is one line with value, allowed values and key."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.refusals import refusal
from tests.unit.test_cli import write_teacher

from corrente import config as c
from corrente.config import schema
from corrente.config.env import Environments
from corrente.config.load import dump_config, load_config, parse_config
from corrente.entrypoints.checks import check_config
from corrente.errors import ConfigError
from corrente.models.limits import context
from corrente.staleness import gate

ROOT = Path(__file__).parents[2]


def _load(tmp_path: Path, text: str, *overrides: str) -> c.RunConfig:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return load_config(path, overrides)


def _refusal(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_config(_load(tmp_path, text, *overrides))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_empty_file_gives_the_defaults(tmp_path: Path):
    assert _load(tmp_path, "") == c.RunConfig()


def test_values_of_the_file_are_taken_and_overrides_win(tmp_path: Path):
    config = _load(
        tmp_path, "[run]\nsteps = 7\nseed = 3\n[learner]\nlr = 1", "run.steps=9", "learner.betas=[0.8, 0.99]"
    )
    assert (config.run.steps, config.run.seed) == (9, 3)
    assert config.learner.lr == 1.0
    assert config.learner.betas == (0.8, 0.99)


def test_overrides_are_toml_and_fall_back_to_text(tmp_path: Path):
    config = _load(
        tmp_path,
        "",
        "run.name=first try",
        'sampling.stop=["\\n", "###"]',
        "observe.timeline=false",
        "run.dir=2026",
        "model.path = some/where",
    )
    assert config.run.name == "first try"
    assert config.sampling.stop == ("\n", "###")
    assert config.observe.timeline is False
    assert config.run.dir == "2026"
    assert config.model.path == "some/where"


def test_last_override_of_a_key_wins(tmp_path: Path):
    assert _load(tmp_path, "", "run.steps=3", "run.steps=5").run.steps == 5


def test_none_switches_an_optional_key_off(tmp_path: Path):
    config = _load(
        tmp_path,
        '[algo.objective]\ndelta = "none"\nepsilon_high = "none"\n[staleness]\nreject = 3',
        "staleness.reject=none",
    )
    assert config.algo.objective == c.DapoObjective(delta=None, epsilon_high=None)
    assert config.staleness.reject is None


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("staleness.maxx", "staleness.max"),
        ("stalness.max", "staleness.max"),
        ("buffer.windw", "buffer.window"),
        ("run.lr", "learner.lr"),
        ("run.max_tokens", "sampling.max_tokens"),
        ("algo.prompts_per_step", "run.prompts_per_step"),
        ("learner.learning_rate", "learner.lr"),
        ("num_generations", "run.group_size"),
        ("prompts.colunm", "prompts.column"),
    ],
)
def test_unknown_key_names_the_nearest_valid_one(tmp_path: Path, key: str, near: str):
    message = _refusal(tmp_path, "", f"{key}=1")
    assert key in message
    assert f"did you mean {near}?" in message


def test_unknown_key_of_a_file_is_refused_with_the_file(tmp_path: Path):
    message = _refusal(tmp_path, "[staleness]\nmaximum = 2")
    assert message == "unknown key staleness.maximum (config.toml): did you mean staleness.max?"


def test_unknown_section_is_refused(tmp_path: Path):
    assert "did you mean buffer.window?" in _refusal(tmp_path, "[bufer]\nwindow = 2")
    assert "run.steps" in _refusal(tmp_path, "steps = 3")


def test_key_that_looks_like_nothing_lists_what_there_is(tmp_path: Path):
    assert "known are observe.samples, observe.timeline" in _refusal(tmp_path, "", "observe.qqqqqqqqqqqqqqq=1")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.group_size=1", ("run.group_size = 1", "an integer of at least 2")),
        ("staleness.max=-1", ("staleness.max = -1", "an integer of at least 0")),
        ("run.steps=2.5", ("run.steps = 2.5", "an integer of at least 1")),
        ("run.steps=true", ("run.steps = true", "an integer")),
        ("learner.lr=0", ("learner.lr = 0", "a number above 0")),
        ("learner.lr=nan", ("learner.lr = nan", "a number above 0")),
        ("learner.lr=inf", ("learner.lr = inf", "a number above 0")),
        ("learner.lr=fast", ('learner.lr = "fast"', "a number above 0")),
        ("limits.failure_fraction=1.5", ("limits.failure_fraction = 1.5", "at least 0 and at most 1")),
        ("prompts.held_out=1.0", ("prompts.held_out = 1.0", "above 0 and below 1")),
        ("algo.objective.kind=ppo", ('algo.objective.kind = "ppo"', '"dapo", "grpo", "bnpo", "dr_grpo"')),
        ("algo.objective.delta=0.5", ("algo.objective.delta = 0.5", 'a number above 1 or "none"')),
        ("staleness.reject=soon", ('staleness.reject = "soon"', 'an integer of at least 0 or "none"')),
        ("reward.functions=exact_line", ('reward.functions = "exact_line"', "a list, each a text")),
        ("learner.betas=[0.9]", ("learner.betas = [0.9]", "a list of 2, each a number")),
        ("observe.timeline=1", ("observe.timeline = 1", "true or false")),
        ("buffer.kind=ring", ('buffer.kind = "ring"', '"none", "double", "window", "stream"')),
        ("engine.kind=sglang", ('engine.kind = "sglang"', '"embedded", "vllm"')),
        ("run.steps", ("--set run.steps", "no value")),
    ],
)
def test_value_out_of_range_says_given_allowed_and_key(tmp_path: Path, override: str, parts: tuple[str, ...]):
    message = _refusal(tmp_path, "", override)
    for part in parts:
        assert part in message


def test_section_written_as_a_value_is_refused(tmp_path: Path):
    assert "[run]" in _refusal(tmp_path, "run = 3")


def test_missing_required_key_is_named(tmp_path: Path):
    assert _refusal(tmp_path, '[prompts]\nkind = "jsonl"').startswith("prompts.path is missing")


def test_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "nothing.toml")
    assert "not valid TOML" in _refusal(tmp_path, "[run\nsteps = 3")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "binary.toml")


def test_kind_left_out_is_the_default_kind(tmp_path: Path):
    assert _load(tmp_path, "[buffer]\nwindow = 3").buffer == c.Window(window=3)


def test_kind_from_the_command_line_drops_the_files_keys_of_the_other_kind(tmp_path: Path):
    text = '[buffer]\nkind = "window"\nwindow = 4\n[staleness]\nmax = 2'
    assert _load(tmp_path, text, "buffer.kind=double").buffer == c.Double()
    assert _load(tmp_path, text, "buffer.kind=none").buffer == c.NoBuffer()
    shared = _load(tmp_path, '[sync]\nkind = "shm"\nevery = 5', "runtime.kind=inline", "sync.kind=inproc")
    assert shared.sync == c.Inproc(every=5)


def test_key_of_the_other_kind_on_the_command_line_is_refused(tmp_path: Path):
    message = _refusal(tmp_path, "", "buffer.kind=double", "buffer.window=3")
    assert "buffer.window" in message
    assert 'buffer.kind = "double"' in message
    assert 'set buffer.kind = "window"' in message


def test_key_of_the_other_kind_in_a_file_is_refused(tmp_path: Path):
    assert 'prompts.kind = "jsonl"' in _refusal(tmp_path, '[prompts]\npath = "x.jsonl"')


def test_sync_follows_the_runtime_unless_it_is_given(tmp_path: Path):
    assert _load(tmp_path, "", "runtime.kind=inline").sync == c.Inproc()
    assert _load(tmp_path, "", "runtime.kind=procs").sync == c.Shm()
    assert 'needs sync.kind = "inproc"' in _refusal(tmp_path, '[sync]\nkind = "shm"', "runtime.kind=inline")


@pytest.mark.parametrize(("kind", "fixed"), [("none", 0), ("double", 1)])
def test_buffer_kind_that_fixes_staleness_refuses_another_bound(tmp_path: Path, kind: str, fixed: int):
    assert f"fixes it at {fixed}" in _refusal(tmp_path, "", f"buffer.kind={kind}", "staleness.max=2")
    assert f"fixes it at {fixed}" in _refusal(tmp_path, f'[buffer]\nkind = "{kind}"\n[staleness]\nmax = 3')
    _load(tmp_path, "", f"buffer.kind={kind}", f"staleness.max={fixed}")


def test_stream_refuses_a_bound_it_does_not_have_and_needs_one_it_has(tmp_path: Path):
    assert "no such limit" in _refusal(tmp_path, "", "buffer.kind=stream", "staleness.max=2")
    assert "staleness.reject or staleness.mask" in _refusal(tmp_path, "", "buffer.kind=stream")
    check_config(_load(tmp_path, "", "buffer.kind=stream", "staleness.mask=2"))


def test_one_process_has_one_engine_and_only_embedded_ones_join(tmp_path: Path):
    for key, value in (("replicas", 2), ("join", "true")):
        said = _refusal(tmp_path, "", "runtime.kind=inline", f"pool.{key}={value}")
        assert f'pool.{key} = {value}: runtime.kind = "inline"' in said
    assert "pool.join = true" in _refusal(tmp_path, "", "engine.kind=vllm", "pool.join=true")
    assert _load(tmp_path, "", "pool.replicas=2", "pool.join=true").pool == c.Pool(replicas=2, join=True)


def test_path_beside_the_config_file_is_found(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "mine.py").write_text("def good(completions): return [1.0 for _ in completions]\n")
    config = _load(
        tmp_path, '[prompts]\nkind = "jsonl"\npath = "rows.jsonl"\n[reward]\nfunctions = ["mine.py:good", "exact_line"]'
    )
    check_config(config)
    assert config.prompts == c.Jsonl(path=str(tmp_path / "rows.jsonl"))
    assert config.reward.functions == (f"{tmp_path / 'mine.py'}:good", "exact_line")


def test_environment_and_tools_beside_the_config_file_are_found(tmp_path: Path):
    (tmp_path / "mine.py").write_text("")
    config = _load(
        tmp_path, '[env]\nkind = "environment"\nfactory = "mine.py:Game"\nfunctions = ["mine.py:look", "a.b:c"]'
    )
    assert isinstance(config.env, Environments)
    assert config.env.factory == f"{tmp_path / 'mine.py'}:Game"
    assert config.env.functions == (f"{tmp_path / 'mine.py'}:look", "a.b:c")


def test_dump_loads_to_the_same_config(tmp_path: Path):
    config = _load(
        tmp_path,
        "",
        *(
            "run.steps=6",
            "algo.objective.delta=none",
            "staleness.reject=2",
            "learner.lr=1e-5",
            'sampling.stop=["\\n", "\\"x\\\\"]',
        ),
        *("sampling.stop_token_ids=[1, 2]", "reward.weights=[0.5]", "run.name=é ☃"),
    )
    assert _load(tmp_path, dump_config(config, notes=["a note"])) == config
    for override in (["buffer.kind=none"], ["buffer.kind=double"], ["buffer.kind=stream", "staleness.mask=1"]):
        config = _load(tmp_path, "", *override)
        assert _load(tmp_path, dump_config(config)) == config
    config = _load(tmp_path, "", "prompts.kind=jsonl", "prompts.path=/tmp/x", "runtime.kind=inline")
    assert _load(tmp_path, dump_config(config)) == config


@given(
    st.builds(
        c.RunConfig,
        run=st.builds(c.Run, name=st.text(), seed=st.integers(0, 2**40)),
        learner=st.builds(c.LearnerConfig, lr=st.floats(min_value=1e-30, max_value=1e30)),
        sampling=st.builds(c.Sampling, stop=st.lists(st.text()).map(tuple), top_p=st.floats(0.01, 1)),
        reward=st.builds(c.Reward, functions=st.lists(st.text()).map(tuple)),
        staleness=st.builds(c.Staleness, reject=st.none() | st.integers(0, 9)),
    )
)
def test_dump_survives_any_text_and_number(config: c.RunConfig):
    assert parse_config(tomllib.loads(dump_config(config))) == config


def test_dump_of_free_tables_loads_to_the_same_config():
    text = """
        chat.template_kwargs = {day = 2026-11-30, "a \\" b" = {"" = [1, {x = 0.5}]}}
        reward.scorers = [{kind = "teacher", path = "m", where = {"Problem Type" = "a", "meta.kind" = true}}]
    """
    config = parse_config(tomllib.loads(text))
    assert parse_config(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize(
    ("value", "name"),
    [(None, "chat.template_kwargs.a"), ([{1: 2}], "chat.template_kwargs.a[0]"), (object, "chat.template_kwargs.a")],
)
def test_value_that_a_config_file_cannot_hold_is_refused(value: object, name: str):
    with pytest.raises(ConfigError, match=re.escape(f"{name} = ") + ".* that a config file can hold"):
        parse_config({"chat": {"template_kwargs": {"a": value}}})


def test_tuple_in_a_free_table_is_the_list_it_is_loaded_as():
    assert parse_config({"chat": {"template_kwargs": {"a": (1, (2,))}}}).chat.template_kwargs == {"a": [1, [2]]}


@given(
    st.dictionaries(
        st.text(),
        st.recursive(
            st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
        ),
    )
)
def test_dump_survives_any_free_table(kwargs: dict[str, object]):
    config = c.RunConfig(chat=c.Chat(template_kwargs=kwargs))
    assert parse_config(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"prompts": {"kind": "mixture", "sources": 5}}, "prompts.sources = 5: it must be a list of tables"),
        ({"eval": {"sources": 5}}, "eval.sources = 5: it must be a list of tables"),
        ({"reward": {"scorers": 5}}, "reward.scorers = 5: it must be a list of tables"),
        ({"buffer": {"kind": ["none"]}}, r'buffer.kind = \["none"\]: it must be one of'),
    ],
)
def test_value_of_another_shape_is_refused(tables: dict[str, dict[str, object]], words: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=words):
        parse_config(tables, beside=tmp_path)


def test_every_key_has_words_for_what_it_allows():
    for section, classes in schema.sections().items():
        for cls in classes:
            for name, hint in schema.fields(cls).items():
                words = schema.allowed(hint)
                assert words.split()[0] in {"an", "a", "true", "one"}, f"{section}.{name}: {words}"


def test_dry_path_never_imports_torch(tmp_path: Path):
    """Loading, checking and dumping the examples, with torch and transformers made unimportable."""
    write_teacher(tmp_path)
    code = f"""
import sys
import tomllib
for name in ("torch", "transformers", "accelerate", "gguf"):
    sys.modules[name] = None
from corrente.config.load import dump_config, load_config
from corrente.entrypoints.checks import check_config
for file in {sorted(str(p) for p in (ROOT / "examples").glob("*.toml"))!r}:
    config = load_config(file)
    check_config(config)
    dump_config(config)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- combinations ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["buffer.window=17"], ("buffer.window = 17", "at most 16")),
        (["buffer.window=25", "staleness.max=2"], ("buffer.window = 25", "at most 24")),
        (["run.steps=10", "sync.every=3"], ("run.steps = 10", "multiple of sync.every = 3")),
        (["run.steps=9", "sync.every=3", "checkpoint.every=4"], ("checkpoint.every = 4", "multiple of sync.every = 3")),
        (["reward.weights=[1, 2]"], ("reward.weights", "2 values for 1")),
        (["reward.functions=[]"], ("reward.functions", "at least one")),
        (['reward.functions=["nope"]'], ("reward.functions = 'nope'", "exact_line")),
        (['reward.functions=["os.path:nope"]'], ("os.path has no 'nope'",)),
        (['reward.functions=["os:sep"]'], ("must be callable", "str")),
        (['reward.functions=["no_such_module:f"]'], ("no_such_module cannot be imported",)),
        (['reward.functions=["no/such/file.py:f"]'], ("no/such/file.py does not exist",)),
        (
            ["model.path=/no/such/model"],
            ("model.path = '/no/such/model'", "no such directory", "smollm2-135m-instruct"),
        ),
        (["sampling.max_tokens=0"], ("sampling.max_tokens = 0", "an integer of at least 1")),
        (["sampling.temperature=0"], ("sampling.temperature = 0", "above 0")),
        (["sampling.temperature=-1"], ("sampling.temperature = -1", "a number of at least 0")),
        (["sampling.top_p=1.5"], ("sampling.top_p = 1.5", "at most 1")),
        (['sampling.stop=[""]'], ("sampling.stop", "none of them empty")),
        (["sampling.max_tokens=64", "engine.max_context=64"], ("engine.max_context = 64", "above sampling.max_tokens")),
        (
            ["sampling.max_tokens=4096"],
            ("sampling.max_tokens = 4096", "the engine takes 4096 tokens", "engine.max_context"),
        ),
        (["learner.betas=[0.9, 1.0]"], ("learner.betas = [0.9, 1.0]", "below 1")),
        (["run.name=a/b"], ("run.name = 'a/b'", "file name")),
        (["run.name=.."], ("run.name = '..'",)),
        (["prompts.held_out=0.0001"], ("prompts.held_out = 0.0001", "set it higher")),
        (["prompts.held_out=0.9999999"], ("prompts.held_out", "set it lower")),
        (["prompts.kind=jsonl", "prompts.path=/no/such.jsonl"], ("prompts.path = /no/such.jsonl", "does not exist")),
    ],
)
def test_combination_that_cannot_work_is_refused(tmp_path: Path, overrides: list[str], parts: tuple[str, ...]):
    message = _refusal(tmp_path, "[prompts]\nshots = 0", *overrides)
    for part in parts:
        assert part in message


def test_window_may_be_as_large_as_the_buffer(tmp_path: Path):
    whole = _load(tmp_path, "", "buffer.window=16")
    assert gate.slots(whole) == gate.window(whole) == 16
    assert refusal(check_config, whole) == ""
    assert "buffer.window = 17: it must be at most 16" in _refusal(tmp_path, "", "buffer.window=17")


def test_run_folder_below_a_file_is_refused(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    assert "is a file" in _refusal(tmp_path, "", f"run.dir={tmp_path}/taken/runs")


def test_budget_that_a_model_has_no_positions_for_is_refused(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    for shape, fits, windowed in (
        ({"max_position_embeddings": 96}, 95, True),
        ({"n_positions": 96}, 95, True),
        ({"max_position_embeddings": 96, "sliding_window": 48}, 47, True),
        ({"max_position_embeddings": 96, "sliding_window": 48, "use_sliding_window": False}, 95, True),
        ({"text_config": {"max_position_embeddings": 96}}, 95, True),
        ({"max_position_embeddings": 96, "sliding_window": 48}, 95, False),
    ):
        (model / "config.json").write_text(json.dumps(shape))
        assert context(model, 0, windowed=windowed) == fits + 1
        if windowed:
            _load(tmp_path, "", f"model.path={model}", f"sampling.max_tokens={fits}")
            message = _refusal(tmp_path, "", f"model.path={model}", f"sampling.max_tokens={fits + 1}")
            assert f"the engine takes {fits + 1} tokens" in message
            here = (f"model.path={model}", f"sampling.max_tokens={fits}")
            check_config(_load(tmp_path, "", *here, f"engine.max_context={fits + 1}"))
            message = _refusal(tmp_path, "", *here, f"engine.max_context={fits + 2}")
            assert f"engine.max_context = {fits + 2}: {model} has {fits + 1} positions" in message


def test_directory_or_bytes_in_place_of_a_config_file_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is a directory; give a TOML file"):
        load_config(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "bytes.toml")


def test_model_directory_needs_a_config(tmp_path: Path):
    assert "no config.json" in _refusal(tmp_path, "", f"model.path={tmp_path}")
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    check_config(_load(tmp_path, "", f"model.path={tmp_path}"))


def _with_rows(tmp_path: Path, rows: str, *overrides: str) -> str:
    (tmp_path / "rows.jsonl").write_text(rows)
    return _refusal(tmp_path, '[prompts]\nkind = "jsonl"\npath = "rows.jsonl"', *overrides)


def test_prompt_file_with_a_missing_column_names_the_line(tmp_path: Path):
    rows = '{"prompt": "a", "answer": "1"}\n\n{"question": "b", "answer": "2"}\n'
    message = _with_rows(tmp_path, rows)
    assert "prompts.column = 'prompt'" in message
    assert "line 3 of" in message
    assert "'question', 'answer'" in message


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        ('{"prompt": "a", "answer": "1"}\nnot json\n', "line 2 is not a JSON object"),
        ("[1, 2]\n", "line 1 is not a JSON object"),
        ('{"prompt": 3, "answer": "1"}\n', "line 1 of"),
        ("\n\n", "has no rows"),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n', "exact_line needs 'answer'"),
        ('{"prompt": "a", "answer": "1", "completions": "x"}\n', "rename the column 'completions'"),
    ],
)
def test_prompt_file_that_cannot_be_used_is_refused(tmp_path: Path, rows: str, part: str):
    assert part in _with_rows(tmp_path, rows)


def test_evaluation_file_is_checked_too(tmp_path: Path):
    (tmp_path / "held.jsonl").write_text('{"text": "a"}\n')
    message = _with_rows(tmp_path, '{"prompt": "a", "answer": "1"}\n', f"prompts.eval_path={tmp_path}/held.jsonl")
    assert "held.jsonl has no such column" in message


def test_reward_module_that_fails_to_import_is_one_line(tmp_path: Path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    message = _refusal(tmp_path, '[reward]\nfunctions = ["bad.py:f"]')
    assert "SyntaxError" in message


def test_infinite_temperature_is_refused():
    config = c.RunConfig(sampling=c.Sampling(temperature=math.inf))
    with pytest.raises(ConfigError, match=r"sampling\.temperature"):
        check_config(config)


def test_pass_at_more_than_there_are_samples_is_refused():
    with pytest.raises(ConfigError, match=r"eval.pass_at = \[1, 4\]: pass@4 needs at least 4 samples.*is 2"):
        check_config(parse_config({}, ["eval.pass_at=[1, 4]", "eval.samples=2"]))


def test_threads_no_machine_has_and_stop_ids_no_model_has_are_refused(tmp_path: Path):
    message = _refusal(tmp_path, "", "runtime.kind=inline", "runtime.threads=100000")
    assert "runtime.threads = 100000: it must be at most 1024" in message
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).touch()
    (model / "config.json").write_text('{"vocab_size": 296}')
    check_config(_load(tmp_path, "", f"model.path={model}", "sampling.stop_token_ids=[295]"))
    message = _refusal(tmp_path, "", f"model.path={model}", "sampling.stop_token_ids=[3, 296]")
    assert "sampling.stop_token_ids = [3, 296]" in message
    assert "has 296 tokens, so 296 is never sampled" in message


@pytest.mark.parametrize(
    "text", ["[run]\nsteps = " + "9" * 5000, "[env]\noptions = {a = " + "[" * 5000 + "]" * 5000 + "}"]
)
def test_toml_that_python_cannot_hold_is_refused(tmp_path: Path, text: str):
    assert "not valid TOML" in _refusal(tmp_path, text)


def test_byte_order_mark_is_no_part_of_a_config(tmp_path: Path):
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[run]\r\nsteps = 7\r\n")
    assert load_config(path).run.steps == 7
