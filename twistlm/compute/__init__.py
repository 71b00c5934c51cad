"""What a step computes: loss, gradient, optimizer, attention, compiled graphs, perplexity."""
