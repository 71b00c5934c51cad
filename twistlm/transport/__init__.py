"""How weights travel between processes: bytes on the wire, sessions, ranks, events."""
