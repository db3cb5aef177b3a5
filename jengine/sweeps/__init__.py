"""Many runs of one config: grids, random draws, searches and seeds."""

from jengine.sweeps.run import sweep as sweep
