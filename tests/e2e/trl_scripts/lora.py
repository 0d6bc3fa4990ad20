"""LoRA with a KL to the model without its adapter."""

import sys

from datasets import Dataset
from peft import LoraConfig

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
        max_steps=3,
        learning_rate=0.05,
        beta=0.04,
        logging_steps=1,
        gradient_checkpointing=False,
        disable_tqdm=True,
    ),
    train_dataset=dataset,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model(f"{OUTPUT}/final")
