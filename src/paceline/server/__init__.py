"""An OpenAI-compatible endpoint: HTTP and text in one process, the engine in another (`pip install paceline[serve]`)."""
