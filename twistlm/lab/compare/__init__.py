"""One table of parents x settings x sizes x methods, each number measured once.

`cells.list_cells(parents, sweep)` lists what is measured as data; `measure.Comparison(parents,
sweep, points)` has `fill(cell)`, which returns a finished result or measures it, and `find(cell)`.
The command (`run.compare`), its table and the paper's Table 1 are made of these.
"""
