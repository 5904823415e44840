"""Continuous batching: schedule, draft, one target pass, verify, commit."""
