"""Measuring on your own model: benchmarks, comparisons, lost nodes, drafts."""
