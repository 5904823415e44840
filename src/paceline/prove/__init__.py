"""Proof on this model and this hardware that speculation does not change the output."""
