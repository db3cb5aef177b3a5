"""Config files: loading, command-line overrides, merging, resolving and writing."""

from jengine.config.config import Config as Config
from jengine.config.containers import check_keys as check_keys
from jengine.config.containers import resolve as resolve
from jengine.config.diff import diff_configs as diff_configs
from jengine.config.dump import dump_config as dump_config
from jengine.config.dump import format_config as format_config
from jengine.config.dump import parse_config as parse_config
from jengine.config.dump import write_config as write_config
from jengine.config.load import load_config as load_config
from jengine.config.load import load_sweep as load_sweep
from jengine.config.merge import merge as merge
from jengine.config.mmengine_keys import drop_without_effect as drop_without_effect
from jengine.config.overrides import apply_overrides as apply_overrides
