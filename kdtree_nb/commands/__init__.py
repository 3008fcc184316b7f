"""The commands of `kdtree-nb`, one module each: `add_arguments(parser)`, and `run(args)` that returns the exit status.

Modules import what they need inside `run`, so that `kdtree-nb --help` answers at once.
"""
