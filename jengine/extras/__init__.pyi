# Written by .ci/extras_names.py, for editors and type checkers.

from jengine.extras import augment as augment
from jengine.extras import cloud as cloud
from jengine.extras import diagnose as diagnose
from jengine.extras import distill as distill
from jengine.extras import drawing as drawing
from jengine.extras import followers as followers
from jengine.extras import imix as imix
from jengine.extras import language as language
from jengine.extras import metrics as metrics
from jengine.extras import mmengine as mmengine
from jengine.extras import networks as networks
from jengine.extras import optimizers as optimizers
from jengine.extras import plan as plan
from jengine.extras import replicas as replicas
from jengine.extras import report as report
from jengine.extras import segmentation as segmentation
from jengine.extras import selfsup as selfsup
from jengine.extras import serving as serving
from jengine.extras import starter as starter
from jengine.extras import sweeps as sweeps
from jengine.extras import trackers as trackers
from jengine.extras import weights as weights
