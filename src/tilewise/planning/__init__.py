"""From a mask and lengths to work: which tiles there are, which of them are full, and in which order they are taken.

- :mod:`tilewise.planning.tiles`: the state of each tile, and the lists of tiles to visit, on any device.
- :mod:`tilewise.planning.bit_tiles`: the same with a bit for each pair of a partial tile, for kernels that know no mask.
- :mod:`tilewise.planning.planner`: the kernels that do this faster, where a device has some.
"""
