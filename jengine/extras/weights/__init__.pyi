# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras.weights.export import export_params as export_params
from jengine.extras.weights.export import import_batch_stats as import_batch_stats
from jengine.extras.weights.export import import_params as import_params
from jengine.extras.weights.hub import export_hub as export_hub
from jengine.extras.weights.huggingface import HubModel as HubModel
from jengine.extras.weights.huggingface import hub_module as hub_module
from jengine.extras.weights.huggingface import transformer_arguments as transformer_arguments
from jengine.extras.weights.pretrained import load_pretrained as load_pretrained
from jengine.extras.weights.weight_source import WeightReader as WeightReader
from jengine.extras.weights.weight_source import WeightSource as WeightSource
from jengine.extras.weights.weight_source import locate_weights as locate_weights
from jengine.extras.weights.weight_source import open_weights as open_weights
