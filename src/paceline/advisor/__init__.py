"""Which method, which k, up to how many requests at once, or none: predicted from little, checked by measurement."""
