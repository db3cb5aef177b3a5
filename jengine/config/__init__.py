"""Objects from configs: registries, checked arguments, config files and overrides.

`load_config` reads a file, `Registry.build` makes a checked object from a dict with a `type`, and
errors name the place in the config. This room imports no other room.
"""

from jengine.config.containers import check_keys as check_keys
from jengine.config.containers import resolve as resolve
from jengine.config.errors import ConfigError as ConfigError
from jengine.config.load import load_config as load_config
from jengine.config.merge import merge as merge
from jengine.config.overrides import apply_overrides as apply_overrides
from jengine.config.plugins import lazy_names as _lazy_names
from jengine.config.registry import DATA_SAMPLERS as DATA_SAMPLERS
from jengine.config.registry import DATASETS as DATASETS
from jengine.config.registry import EVALUATOR as EVALUATOR
from jengine.config.registry import FUNCTIONS as FUNCTIONS
from jengine.config.registry import HOOKS as HOOKS
from jengine.config.registry import LOG_PROCESSORS as LOG_PROCESSORS
from jengine.config.registry import LOOPS as LOOPS
from jengine.config.registry import METRICS as METRICS
from jengine.config.registry import MODELS as MODELS
from jengine.config.registry import OPTIM_WRAPPER_CONSTRUCTORS as OPTIM_WRAPPER_CONSTRUCTORS
from jengine.config.registry import OPTIM_WRAPPERS as OPTIM_WRAPPERS
from jengine.config.registry import OPTIMIZERS as OPTIMIZERS
from jengine.config.registry import PARAM_SCHEDULERS as PARAM_SCHEDULERS
from jengine.config.registry import STRATEGIES as STRATEGIES
from jengine.config.registry import TRANSFORMS as TRANSFORMS
from jengine.config.registry import VISBACKENDS as VISBACKENDS
from jengine.config.registry import VISUALIZERS as VISUALIZERS
from jengine.config.registry import Registry as Registry
from jengine.config.scores import infer_rule as infer_rule
from jengine.config.scores import is_better as is_better
from jengine.config.scores import pick_metric as pick_metric

# Writing needs NumPy, which commands such as `--help` do not wait for.
__getattr__, __dir__ = _lazy_names(
    __name__,
    {
        "names": {
            "diff_configs": "jengine.config.diff",
            "dump_config": "jengine.config.dump",
            "format_config": "jengine.config.dump",
            "parse_config": "jengine.config.dump",
            "write_config": "jengine.config.dump",
        }
    },
)
