# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.mmengine.config import Config as Config
from jengine.extras.mmengine.mmengine_keys import drop_without_effect as drop_without_effect
from jengine.extras.mmengine.runner_calls import load_checkpoint as load_checkpoint
from jengine.extras.mmengine.runner_calls import resume as resume
