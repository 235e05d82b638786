"""Events: the log, the folded snapshot and the timeline."""
