"""`twistlm play`: a local page where a parent and its tickets write side by side."""

from __future__ import annotations

PICKS = ("nested", "random", "best of 4")
