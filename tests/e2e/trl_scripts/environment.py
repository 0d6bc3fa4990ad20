"""An environment class: reset adds to the prompt, public methods are tools, get_reward says what was earned."""

import sys

from datasets import Dataset

from corrente import AsyncGRPOConfig, AsyncGRPOTrainer

MODEL, OUTPUT = sys.argv[1:3]

dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": "cd"}], "size": n} for n in range(4)])
tasks = []


class Bell:
    def __init__(self):
        self.rings = 0

    def reset(self, size, **kwargs) -> str:
        tasks.append(size)
        self.rings = 0
        return "ff"

    def a(self) -> str:
        """
        Rings.

        Returns:
            The letter g.
        """
        self.rings += 1
        return "g"

    def get_reward(self) -> float:
        return min(self.rings, 4) / 4


trainer = AsyncGRPOTrainer(
    model=MODEL,
    environment_factory=Bell,
    args=AsyncGRPOConfig(
        output_dir=OUTPUT,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        max_tool_calling_iterations=1,
        max_steps=3,
        gradient_checkpointing=False,
        disable_tqdm=True,
        corrente={"env.calls": "(?P<name>[ab])(?P<arguments>)"},
    ),
    train_dataset=dataset,
)
trainer.train()
