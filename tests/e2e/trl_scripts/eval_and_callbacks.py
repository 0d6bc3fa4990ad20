"""Evaluation while training, callbacks, early stopping, and a loaded model and tokenizer."""

import sys

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]

train = Dataset.from_dict({"prompt": ["abcd", "bcde", "cdef", "dabc"]})
test = Dataset.from_dict({"prompt": ["hgfe", "gfed"]})
events = []


class Diary(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        events.append(("begin", state.max_steps))

    def on_step_end(self, args, state, control, **kwargs):
        events.append(("step", state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        events.append(("log", sorted(logs)))

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        events.append(("evaluate", metrics["eval_reward"]))

    def on_save(self, args, state, control, **kwargs):
        events.append(("save", state.global_step))

    def on_train_end(self, args, state, control, **kwargs):
        events.append(("end", state.global_step))


def reward_letters(completions, **kwargs):
    return [text.count("a") / max(1, len(text)) for text in completions]


model = AutoModelForCausalLM.from_pretrained(MODEL)
trainer = AsyncGRPOTrainer(
    model=model,
    processing_class=AutoTokenizer.from_pretrained(MODEL),
    reward_funcs=reward_letters,
    args=AsyncGRPOConfig(
        output_dir=OUTPUT,
        per_device_train_batch_size=8,
        num_generations=4,
        num_generations_eval=2,
        max_completion_length=6,
        max_steps=4,
        learning_rate=0.02,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        metric_for_best_model="reward",
        gradient_checkpointing=False,
        disable_tqdm=True,
    ),
    train_dataset=train,
    eval_dataset=test,
    callbacks=[Diary(), EarlyStoppingCallback(early_stopping_patience=10)],
)
trainer.train()
metrics = trainer.evaluate()
trainer.save_model()
