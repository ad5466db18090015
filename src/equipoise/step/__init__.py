"""Inside a step: the files stand in the order in which a batch meets them."""
