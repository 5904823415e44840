"""Whether to draft, with which method and k, up to which concurrency: chosen on half of the prompts, then checked."""
