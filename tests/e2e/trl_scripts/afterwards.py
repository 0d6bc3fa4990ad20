"""What scripts do after training: metrics, state, model and card, through the accelerator's eyes."""

import sys

from datasets import Dataset

from corrente import GRPOConfig, GRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]

dataset = Dataset.from_dict({"prompt": ["abcd", "bcde", "cdef", "dabc"]})


def reward_letters(completions, **kwargs):
    return [text.count("a") / max(1, len(text)) for text in completions]


training_args = GRPOConfig(
    output_dir=OUTPUT,
    per_device_train_batch_size=8,
    num_generations=4,
    max_completion_length=6,
    max_steps=1,
    gradient_checkpointing=False,
    disable_tqdm=True,
)
trainer = GRPOTrainer(
    model=MODEL, reward_funcs=reward_letters, args=training_args, train_dataset=dataset, eval_dataset=dataset
)
result = trainer.train()
metrics = result.metrics
metrics["train_samples"] = len(dataset)
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()
trainer.accelerator.print("Training completed.")

trainer.save_model(training_args.output_dir)
trainer.accelerator.wait_for_everyone()
if trainer.accelerator.is_main_process and trainer.is_world_process_zero():
    trainer.create_model_card(dataset_name="letters", tags=["small"])
    trainer.accelerator.unwrap_model(trainer.model).config.save_pretrained(training_args.output_dir)

metrics = trainer.evaluate()
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
