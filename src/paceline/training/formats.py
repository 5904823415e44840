"""The formats that drafters are exported in, and the methods each has a place for. No torch."""

from paceline.drafters.methods import DFLASH, DSPARK, EAGLE3, MEDUSA

SPECULATORS = "speculators"
FORMATS = {
    EAGLE3: (EAGLE3,),
    SPECULATORS: (EAGLE3, DSPARK, DFLASH),
    MEDUSA: (MEDUSA,),
    DSPARK: (DSPARK, DFLASH),
}
