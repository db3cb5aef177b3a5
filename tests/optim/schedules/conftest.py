"""Provide a fake optimizer wrapper and the values that a chain of schedulers sets."""

from types import SimpleNamespace

import pytest

from jengine.config import PARAM_SCHEDULERS


@pytest.fixture
def make_wrapper():
    """Create parameter groups of SGD, one for each initial learning rate."""

    def make(*lrs, default_group=None, **settings):
        groups = [{"lr": lr, **settings} for lr in lrs]
        return SimpleNamespace(param_groups=groups, base_param_settings=default_group)

    return make


@pytest.fixture
def build():
    """Build schedulers from configs, in order."""

    def build_all(wrapper, *cfgs):
        return [PARAM_SCHEDULERS.build(cfg, optimizer=wrapper) for cfg in cfgs]

    return build_all


@pytest.fixture
def collect():
    """Return the values of one group during `count` iterations."""

    def values(wrapper, schedulers, count, name="lr", group=0):
        out = []
        for _ in range(count):
            out.append(wrapper.param_groups[group][name])
            for scheduler in schedulers:
                scheduler.step()
        return out

    return values
