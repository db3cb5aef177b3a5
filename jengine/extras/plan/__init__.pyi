# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.plan.collectives import Collective as Collective
from jengine.extras.plan.collectives import find_collectives as find_collectives
from jengine.extras.plan.collectives import traffic as traffic
from jengine.extras.plan.flops import count_flops as count_flops
from jengine.extras.plan.hlo import Operation as Operation
from jengine.extras.plan.hlo import Program as Program
from jengine.extras.plan.program_costs import measure_program as measure_program
