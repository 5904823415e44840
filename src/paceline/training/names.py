"""What can be trained, by the names that the command line takes. No torch."""

from paceline.drafters.methods import DFLASH, DSPARK

TRAINABLE = (DSPARK, DFLASH)
