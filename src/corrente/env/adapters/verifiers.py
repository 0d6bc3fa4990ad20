"""Tasks of verifiers (``verifiers.v1``): the policy answers each once, in the run's own loop, and the task scores what was said.

taken     the task's data (``prompt``, ``system_prompt``), ``setup`` and ``finalize`` that take no runtime, its rewards, metrics
          and plugged judges
left      harnesses: they drive the model through servers of their own, in text, so what was sampled would not be what is trained
refused   tasks that need more than an answer: a container or another runtime, tool servers, a simulated user, hooks between turns

verifiers leaves rewards that need a runtime out of the score where there is none; here such a task is refused, when the first
instance is made. The trace that is scored holds the messages, and no tokens: asking it for their number is an error, not 0.

Scoring runs on the event loop, as it does in verifiers: the comparison of mathematical answers there sets signals, and scores 0
outside of the main thread. A reward that blocks holds up the run.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from corrente.common.imports import import_callable
from corrente.env.adapters.packages import import_package
from corrente.env.environment import Observation
from corrente.errors import ConfigError, RolloutError

_LOCK = threading.Lock()
_LOADED: dict[tuple[str, str, str], _Tasks] = {}
"""Shared by all instances of an environment; a Taskset that was given is kept with its tasks, so that its id stays its own."""

RUNTIME = "there is no runtime here: the policy answers in the run's own loop"
BOXED = ("image", "workdir", "agent_user", "skills", "artifacts")
"""Fields of a task's data that say where in a runtime it is worked on."""


class Verifiers:
    """Implements Environment. Which task is played follows from the seed, so a group plays the same one, or from ``column``.

    ``taskset``: the id of an installed one, "package.module:Class", "path/to/file.py:Class", or a Taskset. ``config``: the keys
    of its config; ``select``: those of SelectConfig (include, exclude, shuffle, seed, skip, limit). ``column``: of the prompt; a
    number is a task's idx, a text its id or name. ``thinking``: what ends the thinking; what is said up to it is the answer's
    reasoning, and no part of its content. Empty: everything is content.

    The reward is the weighted sum of the task's; each by itself, unweighted, is ``rewards/<name>`` in the info, beside
    ``metrics/<name>``. ConfigError for what there is not, and for tasks that need what there is not.
    """

    without_tools = "the task that scores the answer would not hear of calls"

    def __init__(
        self,
        taskset: Any,
        *,
        config: Mapping[str, Any] | None = None,
        select: Mapping[str, Any] | None = None,
        column: str = "",
        thinking: str = "</think>",
    ) -> None:
        self._vf = _import_verifiers()
        self._tasks = _load_tasks(self._vf, taskset, config or {}, select or {})
        self._column, self._thinking = column, thinking
        self._task: Any = None
        self._trace: Any = None

    async def reset(self, task: Mapping[str, Any], *, seed: int) -> Observation:
        """Begin an episode. RolloutError for a column that names no task."""
        self._task = self._chosen_task(task, seed)
        self._trace = _empty_trace(self._vf, self._task)
        await self._run_hook("setup")
        opening = _opening_messages(self._vf, self._task.data)
        for message in opening:
            self._add_message(message)
        self._trace.timing.agent.start = time.time()
        return Observation(messages=tuple(map(_chat_message, opening)))

    async def step(self, message: Mapping[str, Any]) -> Observation:
        """Score the answer, which ends the episode."""
        trace, task = self._trace, self._task
        trace.timing.agent.end = time.time()
        at = self._add_message(self._answer_message(str(message.get("content") or "")), sampled=True)
        trace.calls.append(self._vf.ModelCall(node=at, finish_reason="stop"))
        trace.stop("agent_completed")
        await self._run_hook("finalize")
        await task.score(trace, runtime=None)
        trace.ok = True
        return Observation(reward=trace.reward, done=True, info=_trace_info(task, trace))

    async def close(self) -> None:
        """Nothing is held."""

    def _chosen_task(self, columns: Mapping[str, Any], seed: int) -> Any:
        if not self._column:
            return self._tasks.tasks[seed % len(self._tasks.tasks)]
        if self._column not in columns:
            raise RolloutError(
                f"env.options.column = {self._column!r}: the prompt has {', '.join(columns) or 'no columns'}"
            )
        wanted = columns[self._column]
        if not isinstance(wanted, int | str) or wanted not in self._tasks.named:
            raise RolloutError(f"the prompt's column {self._column!r} is {wanted!r}; no task has this idx, id or name")
        return self._tasks.named[wanted]

    async def _run_hook(self, name: str) -> None:
        """Run ``setup`` or ``finalize``, where the task has one of its own."""
        if getattr(type(self._task), name) is not getattr(self._vf.Task, name):
            hook = getattr(self._task, name)
            await hook(**({"trace": self._trace} if "trace" in inspect.signature(hook).parameters else {}))

    def _answer_message(self, text: str) -> Any:
        thought, ended, said = text.rpartition(self._thinking) if self._thinking else ("", "", text)
        if not ended:
            return self._vf.AssistantMessage(content=text)
        return self._vf.AssistantMessage(
            content=said.lstrip(), reasoning_content=thought.strip().removeprefix("<think>").lstrip()
        )

    def _add_message(self, message: Any, *, sampled: bool = False) -> int:
        nodes = self._trace.nodes
        nodes.append(self._vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))
        return len(nodes) - 1


class _Tasks(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Tasks in their order, and by the names that a column may use. ``taskset`` holds them."""

    taskset: Any
    tasks: tuple[Any, ...]
    named: dict[Any, Any]


# ---- loading ----------------------------------------------------------------------------------------------------------------


def _import_verifiers() -> Any:
    return import_package("verifiers.v1", of="Verifiers", install="'verifiers>=0.4'")


def _load_tasks(vf: Any, taskset: Any, config: Mapping[str, Any], select: Mapping[str, Any]) -> _Tasks:
    """Load and check the tasks, once for all instances."""
    given = taskset if isinstance(taskset, str) else f"{type(taskset).__name__} {id(taskset)}"
    key = given, repr(dict(config)), repr(dict(select))
    with _LOCK:
        if key not in _LOADED:
            found = _make_taskset(vf, taskset, config)
            tasks = _select_tasks(vf, found, select)
            _refuse_unmet_needs(vf, found, tasks)
            _LOADED[key] = _Tasks(taskset=taskset, tasks=tasks, named=_tasks_by_name(tasks))
        return _LOADED[key]


def _make_taskset(vf: Any, taskset: Any, config: Mapping[str, Any]) -> Any:
    if isinstance(taskset, vf.Taskset):
        if config:
            raise ConfigError("env.options.config: a Taskset is given, which has its config already; leave this out")
        return taskset
    if not isinstance(taskset, str):
        raise ConfigError(f"env.options.taskset is of type {type(taskset).__name__}; it must be a name, or a Taskset")
    by_id = ":" not in taskset
    cls = _installed_class(vf, taskset) if by_id else import_callable(taskset, key="env.options.taskset")
    if not (isinstance(cls, type) and issubclass(cls, vf.Taskset)):
        raise ConfigError(f"env.options.taskset = {taskset!r}: it is no class of Taskset")
    generic = import_package("verifiers.v1.utils.generic", of="Verifiers", install="'verifiers>=0.4'")
    config_type = generic.concrete_type(cls, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    try:
        return cls(config_type.model_validate({**config, **({"id": taskset} if by_id else {})}))
    except Exception as error:  # plugins that the config names are anybody's code
        raise ConfigError(f"env.options.config of {taskset!r}: {_error_line(error)}") from error


def _installed_class(vf: Any, taskset: str) -> type:
    """Find the class of an installed taskset. ConfigError where its package brings its own environment or harness."""
    loaders = import_package("verifiers.v1.utils.loaders", of="Verifiers", install="'verifiers>=0.4'")
    try:
        cls = loaders.taskset_class(taskset)
        env, harness = loaders.environment_class(taskset), loaders.default_harness_id(taskset)
    except Exception as error:  # whatever the package does when it is imported
        raise ConfigError(f"env.options.taskset = {taskset!r}: {_error_line(error)}") from error
    own = env.__name__ if env is not vf.SingleAgentEnv else f"the harness {harness!r}" if harness != "bash" else ""
    if own:
        raise ConfigError(
            f"env.options.taskset = {taskset!r}: its package brings {own} to play its tasks, which drives the model itself, in "
            "text; here the policy answers a task once, in the run's own loop"
        )
    return cls


def _select_tasks(vf: Any, taskset: Any, select: Mapping[str, Any]) -> tuple[Any, ...]:
    try:
        view = taskset.select(vf.SelectConfig.model_validate(dict(select)))
    except ValueError as error:
        raise ConfigError(f"env.options.select: {_error_line(error)}") from error
    name = type(taskset).__name__
    if not view.bounded:
        raise ConfigError(
            f"env.options.taskset: {name} has tasks without end; say how many in env.options.select.limit"
        )
    try:
        tasks = tuple(view)
    except Exception as error:  # anybody's code
        raise ConfigError(f"env.options.taskset: {name} cannot load: {_error_line(error)}") from error
    if not tasks:
        raise ConfigError(f"env.options.select leaves no task of {name}")
    return tasks


def _error_line(error: Exception) -> str:
    """Describe an error on one line, with its key where pydantic names one."""
    wrong = getattr(error, "errors", None)
    if wrong is None:
        return f"{type(error).__name__}: {error}"
    return "; ".join(f"{'.'.join(map(str, one['loc'])) or 'all of it'}: {one['msg']}" for one in wrong())


def _tasks_by_name(tasks: tuple[Any, ...]) -> dict[Any, Any]:
    """Index tasks by idx, id and name; of two with the same, the first counts."""
    out: dict[Any, Any] = {}
    for task in tasks:
        for name in (task.data.idx, task.data.id, task.data.name):
            if name is not None:
                out.setdefault(name, task)
    return out


# ---- what cannot be played --------------------------------------------------------------------------------------------------


def _refuse_unmet_needs(vf: Any, taskset: Any, tasks: tuple[Any, ...]) -> None:
    """Raise ConfigError for the first need of a task that is not met here."""
    judged: set[tuple[type, int]] = set()
    if servers := type(taskset).toolsets(taskset.config):
        raise ConfigError(f"{type(taskset).__name__} {_tools_refusal(servers)}")
    for task in tasks:
        of_type = type(task), id(task.config)
        needs = [] if of_type in judged else _type_needs(vf, task)
        judged.add(of_type)
        if need := next(iter((*needs, *_data_needs(vf, task.data))), ""):
            raise ConfigError(f"{type(taskset).__name__}, task {_task_label(task)}: {need}")


def _type_needs(vf: Any, task: Any) -> Iterator[str]:
    """List unmet needs of all tasks of this type and config, as texts of a refusal."""
    cls, judges = type(task), _plugged_judges(task)
    rewards = {**_functions_by_name(task.hooks("reward")), **{judge.reward_name: judge.score for judge in judges}}
    if cls.NEEDS_CONTAINER:
        yield f"{cls.__name__}.NEEDS_CONTAINER, and {RUNTIME}"
    if servers := cls.toolsets(task.config):
        yield f"{cls.__name__} {_tools_refusal(servers)}"
    hooks = {
        name: getattr(task, name) for name in ("setup", "finalize") if getattr(cls, name) is not getattr(vf.Task, name)
    }
    for name in _needing_runtime(hooks):
        yield f"{cls.__name__}.{name} takes a runtime, and {RUNTIME}"
    if cls.runtime_env is not vf.Task.runtime_env:
        yield f"{cls.__name__}.runtime_env is for a runtime, and {RUNTIME}"
    for kind, functions in (("reward", rewards), ("metric", _functions_by_name(task.hooks("metric")))):
        for name in _needing_runtime(functions):
            yield f"the {kind} {name!r} takes a runtime, and {RUNTIME}; without one verifiers would leave it out of the score"
    decorators = import_package("verifiers.v1.utils.decorators", of="Verifiers", install="'verifiers>=0.4'")
    for function in decorators.discover_decorated(task, "intercept"):
        yield f"{function.__name__} intercepts what is read or said, so what is scored would not be what is trained"
    for function in task.hooks("stop"):
        yield f"{function.__name__} stops conversations between turns; here a task is answered once"
    if not rewards:
        yield f"{cls.__name__} has no reward and no judge, so no answer would earn anything"


def _data_needs(vf: Any, data: Any) -> Iterator[str]:
    """List unmet needs of one task's data, as texts of a refusal."""
    for name in BOXED:
        if getattr(data, name):
            yield f"its data has {name} = {getattr(data, name)!r}, and {RUNTIME}"
    if not data.prompt:
        yield "it has no prompt, so a user is to open the conversation; users are simulated by verifiers' own environments alone"
        return
    messages = _opening_messages(vf, data)
    if any(isinstance(message, vf.ToolMessage) or getattr(message, "tool_calls", None) for message in messages):
        yield "its prompt has calls of tools, and answers of them; there are no tools here"
    if any(
        part.type != "text" for message in messages if isinstance(message.content, list) for part in message.content
    ):
        yield "its prompt has images; only text can be read here"
    if messages[-1].role == "assistant":
        yield "its prompt ends with a message of the assistant, so the policy has nothing to answer"


def _plugged_judges(task: Any) -> list[Any]:
    try:
        return task.plugged_judges()
    except Exception as error:  # anybody's code
        raise ConfigError(f"env.options.config.task.judges: {_error_line(error)}") from error


def _functions_by_name(functions: list[Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    return {function.__name__: function for function in functions}


def _needing_runtime(functions: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    """Names of the functions that cannot be called without a runtime."""
    for name, function in functions.items():
        parameter = inspect.signature(function).parameters.get("runtime")
        if parameter is not None and parameter.default is inspect.Parameter.empty:
            yield name


def _tools_refusal(servers: list[Any]) -> str:
    names = ", ".join(type(server).__name__ for server in servers)
    return f"has tools ({names}), which servers of verifiers answer while a harness plays; none is started here"


# ---- what is said -----------------------------------------------------------------------------------------------------------


def _opening_messages(vf: Any, data: Any) -> list[Any]:
    """Messages before the answer, as in verifiers' own chat loop."""
    system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    return [*system, *([vf.UserMessage(content=data.prompt)] if isinstance(data.prompt, str) else data.prompt)]


def _chat_message(message: Any) -> dict[str, Any]:
    """Convert a message for the chat template: the parts of its content become one text."""
    content = message.content
    text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
    reasoning = getattr(message, "reasoning_content", None)
    return {"role": message.role, "content": text, **({"reasoning_content": reasoning} if reasoning else {})}


def _empty_trace(vf: Any, task: Any) -> Any:
    """Make a trace of ``task`` without messages."""
    states = import_package("verifiers.v1.state", of="Verifiers", install="'verifiers>=0.4'")
    return _trace_class(vf)(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=states.state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig(harness={"id": "null"})),
    )


@functools.cache
def _trace_class(vf: Any) -> type:
    def unknown(trace: Any) -> Any:
        raise RolloutError(
            "Verifiers: the trace that a task scores holds messages; how many tokens they are is not in it"
        )

    counts = ("usage", "num_input_tokens", "num_output_tokens", "num_total_tokens")
    return type("Trace", (vf.Trace,), {"__module__": __name__, **{name: property(unknown) for name in counts}})


def _trace_info(task: Any, trace: Any) -> dict[str, Any]:
    rewards = {f"rewards/{name}": reward.score for name, reward in trace.rewards.items()}
    metrics = {f"metrics/{name}": value for name, value in trace.metrics.items()}
    return {"task": _task_label(task), **rewards, **metrics, **({"info": trace.info} if trace.info else {})}


def _task_label(task: Any) -> str:
    name = task.data.name or task.data.id
    return f"{task.data.idx} ({name})" if name else str(task.data.idx)
