# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.report.goodput import Goodput as Goodput
from jengine.extras.report.goodput import measure_goodput as measure_goodput
from jengine.extras.report.page import collect_data as collect_data
from jengine.extras.report.progress import ProgressHook as ProgressHook
from jengine.extras.report.report_command import report as report
from jengine.extras.report.server import make_server as make_server
