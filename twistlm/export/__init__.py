"""Tickets for other runtimes: one file per format."""
