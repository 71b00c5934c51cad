"""Post-training baselines: what a pruner does to a parent that was not trained for it."""
