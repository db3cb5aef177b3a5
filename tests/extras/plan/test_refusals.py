"""What plans refuse: a call, its error, and the words that must be in the message."""

import pytest

from jengine.config.errors import ConfigError
from jengine.extras.plan.plan import scale_batches, set_devices
from jengine.extras.plan.plan_process import PlanError
from jengine.extras.plan.plan_search import build_space, search
from jengine.extras.plan.topologies import parse_topology
from jengine.parallel import build_mesh
from tests.refusals import check_row

from .test_slices import make_slices

CFG = dict(
    model=dict(type="M", module=dict(type="N", remat=False)),
    train_dataloader=dict(batch_size=8),
    parallel=dict(type="Pjit", rules=[("up", (None, "tensor"))]),
)
MESH = dict(data=3, tensor=2)


def fail(candidates):
    """Find that no candidate can be compiled."""
    return [dict(candidate=each._asdict(), fits=False, error="ValueError: no", reason="no") for each in candidates]


def share_among(processes):
    scale_batches(set_devices(dict(CFG, train_cfg=dict(max_epochs=1)), 6, MESH), build_mesh(MESH, 6), processes)


REFUSED = {
    "processes whose rows overlap": (lambda: share_among(2), ConfigError, "parts of a batch", "got [(0, 1), (1, 2)]"),
    "processes that do not divide the devices": (lambda: share_among(4), ConfigError, "--processes", "6 devices", "got 4"),
    "candidates that all fail": (lambda: search(build_space(CFG, parse_topology("v5e:2x2"), None), fail, report=lambda line: None), PlanError, "ValueError: no"),
    "parts of slices": (lambda: build_mesh(dict(data=2, fsdp=12), make_slices(2)[:24]), ConfigError, "devices", "each slice", "{0: 16, 1: 8}"),
    "a part of a slice with holes": (lambda: build_mesh({}, make_slices(1)[:5]), ConfigError, "holes", "got 5"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_planned_is_refused(row, request):
    check_row(request, *row)
