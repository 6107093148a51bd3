"""Train a Megatron-core model: build it from a Hugging Face folder, run its schedules, and give its weights back."""
