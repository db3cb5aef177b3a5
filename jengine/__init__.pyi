# Written by .ci/extras_names.py, for editors and type checkers.

from jengine import checkpoint as checkpoint
from jengine import config as config
from jengine import data as data
from jengine import evaluation as evaluation
from jengine import extras as extras
from jengine import hooks as hooks
from jengine import logging as logging
from jengine import model as model
from jengine import optim as optim
from jengine import parallel as parallel
from jengine import runner as runner
from jengine import train as train
from jengine.config import load_config as load_config
from jengine.extras.report.report_command import report as report
from jengine.extras.serving.loaded_model import load_model as load_model
from jengine.extras.sweeps.run import sweep as sweep
from jengine.runner import Runner as Runner
from jengine.versions import __version__ as __version__

_REGISTERED_BY: dict[str, str]
