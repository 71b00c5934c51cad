"""The rounds (1)-(5): dispatch, local steps, aggregation, checkpoints, plans."""
