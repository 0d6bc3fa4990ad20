"""Conversational prompts: messages in, messages to the reward function."""

import sys

from datasets import Dataset

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]

dataset = Dataset.from_list(
    [
        {"prompt": [{"role": "system", "content": "e"}, {"role": "user", "content": text}]}
        for text in ("ab", "cd", "ef", "gh")
    ]
)
seen = []


def reward_content(prompts, completions, **kwargs):
    seen.append((prompts[0], completions[0]))
    contents = [completion[0]["content"] for completion in completions]
    return [text.count("a") / max(1, len(text)) for text in contents]


trainer = AsyncGRPOTrainer(
    model=MODEL,
    reward_funcs=reward_content,
    args=AsyncGRPOConfig(
        output_dir=OUTPUT,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_steps=3,
        max_staleness=1,
        shuffle_dataset=False,
        chat_template_kwargs={"enable_thinking": False},
        gradient_checkpointing=False,
        disable_tqdm=True,
    ),
    train_dataset=dataset,
)
trainer.train()
