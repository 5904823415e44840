"""The instrument for the sceptical: is the output really unchanged, on this model and this hardware."""
