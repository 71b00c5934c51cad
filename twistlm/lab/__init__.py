"""Measuring: benchmarks, comparisons, the paper's experiments, and the page that shows them."""
