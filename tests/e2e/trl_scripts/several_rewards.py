"""Several rewards with weights: one that sees a column, an async one that applies to some rows only, and a partial."""

import functools
import sys

from datasets import Dataset

from corrente import GRPOConfig, GRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]

dataset = Dataset.from_list(
    [{"prompt": "abcd", "answer": "a", "task": "letters"}, {"prompt": "bcde", "answer": "b", "task": "length"}] * 4
)


def answer_reward(completions, answer, log_metric, **kwargs):
    log_metric("asked", len(completions))
    return [text.count(letter) / max(1, len(text)) for text, letter in zip(completions, answer, strict=True)]


async def length_reward(completion_ids, task, **kwargs):
    return [len(ids) / 6 if kind == "length" else None for ids, kind in zip(completion_ids, task, strict=True)]


def limit(completions, most, **kwargs):
    return [0.0 if len(text) <= most else -1.0 for text in completions]


trainer = GRPOTrainer(
    model=MODEL,
    reward_funcs=[answer_reward, length_reward, functools.partial(limit, most=5)],
    args=GRPOConfig(
        output_dir=OUTPUT,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        reward_weights=[1.0, 0.5, 0.1],
        logging_steps=1,
        gradient_checkpointing=False,
        disable_tqdm=True,
    ),
    train_dataset=dataset,
)
trainer.train()
