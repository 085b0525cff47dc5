"""The columns of the launch tables: what a kernel program finds out about its tensor, and where.

A bucket of tensors is stepped by one launch for its full tiles (16 whole groups that lie side by side, at aligned
addresses) and one for the rest. Program ``b`` works on one tile of the rest, or on TILES_PER_PROGRAM consecutive full
ones: ``program_tensor[b]`` names the tensor, ``b - FIRST_FULL`` or ``b - FIRST_REST`` counts its programs. Row ``t`` of
the integer table holds a tensor's addresses and extents, row ``t`` of the scalar table the fp32 numbers of this step,
and a group table the fp64 numbers of each param group.
"""

from __future__ import annotations

# A program takes several tiles in turn: that amortises what it must look up before it can load, and its loads run
# ahead. Up to this many, where that leaves this many programs. Measured, see docs/decisions.md.
MAX_TILES_PER_PROGRAM = 16
ENOUGH_PROGRAMS = 8192

# int64 table, one row a tensor.
WEIGHT, GRAD, CORRECTION, MOMENT1, SCALE1, MOMENT2, SCALE2, FINGERPRINT, STEP = range(9)
NUM_GROUPS, ROW, FULL_TILES, TILES_PER_PROGRAM, FIRST_FULL, FIRST_REST, PARAM_GROUP = range(9, 16)
TABLE_COLUMNS = 16

# fp32 table, one row a tensor; the first twelve are numerics.rules.StepScalars in order.
LR, SHRINK, L2, DECAY1, GAIN1, DECAY2, GAIN2, EPS, STEP_SIZE, ROOT_BIAS2, GRAD_WEIGHT, BUFFER_WEIGHT = range(12)
GRAD_FACTOR, DITHER_BASE, SKIP = range(12, 15)
SCALAR_COLUMNS = 16

# fp64 table, one row a param group: numerics.rules.GroupScalars in order.
(
    G_LR,
    G_DECAY_PER_LR,
    G_L2,
    G_DECAY1,
    G_GAIN1,
    G_FIRST_GAIN1,
    G_DECAY2,
    G_GAIN2,
    G_EPS,
    G_BIAS1,
    G_BIAS2,
    G_GRAD_WEIGHT,
    G_BUFFER_WEIGHT,
    G_SIGN,
) = range(14)
GROUP_COLUMNS = 14
