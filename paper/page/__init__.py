"""Figures, tables and the page they stand on."""
