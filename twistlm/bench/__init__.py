"""Times, bytes and memory on this machine."""
