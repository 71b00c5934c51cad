"""The machine: files, locks, signals, terminal, device, provenance. Knows nothing of models."""
