"""What can be trained, by the names that the command line takes. No torch."""

from paceline.drafters.methods import DFLASH, DRAFT_MODEL, DSPARK, EAGLE, EAGLE3, MEDUSA

DRAFT = "draft"  # a model of its own, for the method of draft models
TRAINABLE = (DSPARK, DFLASH, EAGLE3, EAGLE, MEDUSA, DRAFT)


def drafting_method(trained: str) -> str:
    """The engine's method that uses what was trained."""
    return DRAFT_MODEL if trained == DRAFT else trained
