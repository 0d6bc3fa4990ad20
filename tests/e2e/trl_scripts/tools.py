"""An agent with tools: Python functions with type hints and a docstring."""

import sys

from datasets import Dataset

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]

dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in ("cd", "de", "ef", "fc")])


def a() -> str:
    """
    Says g.

    Returns:
        The letter g.
    """
    return "g"


def reward_calls(completions, **kwargs):
    return [sum(m["role"] == "tool" and m["content"] == "g" for m in said) / 4 for said in completions]


trainer = AsyncGRPOTrainer(
    model=MODEL,
    reward_funcs=reward_calls,
    args=AsyncGRPOConfig(
        output_dir=OUTPUT,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        max_tool_calling_iterations=1,
        max_steps=3,
        gradient_checkpointing=False,
        disable_tqdm=True,
        corrente={"env.calls": "(?P<name>[ab])(?P<arguments>)"},  # the tiny model's letters spell no JSON
    ),
    train_dataset=dataset,
    tools=[a],
)
trainer.train()
