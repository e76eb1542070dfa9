"""What can stand on the ladder, one module per target.

Each has `CELLS`, the configurations it knows; `check(options)`, which raises `ConfigError` for options that it cannot
serve; `cells(options)`, those of `options.cells` that it climbs in; and `climb_cell(cell, options, workload,
reproduce)`, one climb, which answers with a `CellResult`.
"""
