"""Times, bytes and memory on the machine at hand."""
