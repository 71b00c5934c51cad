"""The page, its figures and the markdown that come out of points and run folders."""
