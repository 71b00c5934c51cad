"""A ticket in the formats that other programs read."""
