"""GRPO as TRL's quick start has it: a dataset, a reward function, train."""

import sys

from datasets import Dataset

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]

dataset = Dataset.from_dict({"prompt": ["abcd", "bcde", "cdef", "dabc", "fgha", "hgfe"]})


def reward_letters(completions, **kwargs):
    return [text.count("a") / max(1, len(text)) for text in completions]


training_args = AsyncGRPOConfig(
    output_dir=OUTPUT,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=6,
    num_train_epochs=2,
    learning_rate=0.02,
    logging_steps=2,
    gradient_checkpointing=False,
    disable_tqdm=True,
)
trainer = AsyncGRPOTrainer(model=MODEL, reward_funcs=reward_letters, args=training_args, train_dataset=dataset)
trainer.train()
