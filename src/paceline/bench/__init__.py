"""Measuring speed: what a method gives on a model, on a machine, on one's own prompts, against plain decoding."""
