# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.mmengine.log_calls import print_log as print_log
from jengine.logging.async_writer import AsyncWriter as AsyncWriter
from jengine.logging.backend import BaseVisBackend as BaseVisBackend
from jengine.logging.console import build_logger as build_logger
from jengine.logging.console import current_logger as current_logger
from jengine.logging.console import escape_control as escape_control
from jengine.logging.console import escape_name as escape_name
from jengine.logging.console import log_error as log_error
from jengine.logging.console import open_log_file as open_log_file
from jengine.logging.console import set_file_handler as set_file_handler
from jengine.logging.console import terminal as terminal
from jengine.logging.console import terminal_handlers as terminal_handlers
from jengine.logging.convert import Histogram as Histogram
from jengine.logging.files import LocalVisBackend as LocalVisBackend
from jengine.logging.history import HistoryBuffer as HistoryBuffer
from jengine.logging.loss_watch import LossWatch as LossWatch
from jengine.logging.message_hub import MessageHub as MessageHub
from jengine.logging.processor import LogProcessor as LogProcessor
from jengine.logging.stopwatch import Stopwatch as Stopwatch
from jengine.logging.tables import format_table as format_table
from jengine.logging.tables import shorten_rows as shorten_rows
from jengine.logging.tensorboard import TensorboardVisBackend as TensorboardVisBackend
from jengine.logging.visualizer import Visualizer as Visualizer
