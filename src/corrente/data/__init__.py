"""The data that flows between the stages: prompts, completions, episodes, groups, rows, batches. numpy only."""
