"""`twistlm compare`: what random tickets of several parents are worth beside post-training pruning."""
