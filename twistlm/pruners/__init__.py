"""The rivals: SparseGPT, Wanda, Z-Pruner, magnitude and blocks by score, on one walk."""
