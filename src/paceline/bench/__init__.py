"""Speed of a method on a model, on a machine, on one's own prompts, beside plain decoding."""
