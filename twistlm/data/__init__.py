"""Token files, the stream of batches, and how text becomes tokens."""
