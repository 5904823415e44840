"""An OpenAI-compatible endpoint: HTTP and text in one process, the engine in another. Needs `paceline[serve]`."""
