"""Trainers of drafters: tokens from the target itself, the frozen target in plain torch, one file per trainee."""
