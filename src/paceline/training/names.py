"""What can be trained, and the formats that drafters are exported in, by the command line's names. No torch."""

from paceline.drafters.methods import DFLASH, DRAFT_MODEL, DSPARK, EAGLE, EAGLE3, MEDUSA, SPECULATORS

DRAFT = "draft"  # a model of its own, for the method of draft models
TRAINABLE = (DSPARK, DFLASH, EAGLE3, EAGLE, MEDUSA, DRAFT)
FORMATS = {  # and the methods that each has a place for
    EAGLE3: (EAGLE3,),
    SPECULATORS: (EAGLE3, DSPARK, DFLASH),
    MEDUSA: (MEDUSA,),
    DSPARK: (DSPARK, DFLASH),
}


def drafting_method(trained: str) -> str:
    """The engine's method that uses what was trained."""
    return DRAFT_MODEL if trained == DRAFT else trained
