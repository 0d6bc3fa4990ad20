"""Asynchronous GRPO on vLLM, launched beside the learner."""

import sys

from datasets import Dataset

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]

dataset = Dataset.from_dict({"prompt": ["abcd", "bcde", "cdef", "dabc"]})


def reward_letters(completions, **kwargs):
    return [text.count("a") / max(1, len(text)) for text in completions]


trainer = AsyncGRPOTrainer(
    model=MODEL,
    reward_funcs=reward_letters,
    args=AsyncGRPOConfig(
        output_dir=OUTPUT,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        max_steps=2,
        use_vllm=True,
        vllm_mode="colocate",
        gradient_checkpointing=False,
        disable_tqdm=True,
    ),
    train_dataset=dataset,
)
trainer.train()
