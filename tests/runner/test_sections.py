"""Types of the Runner's arguments: they name what the code accepts, and nothing else."""

import dataclasses
import typing

import pytest

from jengine.config.annotations import parameters_of
from jengine.evaluation.sections import _LOADER_ARGUMENTS, EvalSettings
from jengine.hooks.hook_list import _NOTEBOOK_HOOKS, DEFAULT_HOOKS
from jengine.optim import AmpOptimWrapper, OptimWrapper
from jengine.runner import (
    DefaultHooks,
    EpochBasedTrainLoop,
    EvalCfg,
    EvaluationCfg,
    IterBasedTrainLoop,
    LoaderCfg,
    OptimWrapperCfg,
    TrainCfg,
    ValLoop,
)
from jengine.runner.loops import TrainSettings


def keys(kind):
    return set(typing.get_type_hints(kind))


def arguments(*entries):
    names = {name for entry in entries for name in parameters_of(entry)}
    return names - {"runner", "dataloader", "evaluator", "kwargs"}


def test_train_cfg_has_the_arguments_of_both_loops():
    assert keys(TrainCfg) == arguments(EpochBasedTrainLoop, IterBasedTrainLoop) | {"type", "by_epoch"}


def test_val_cfg_has_the_arguments_of_the_loop():
    assert keys(EvalCfg) == arguments(ValLoop) | {"type"}


def test_optim_wrapper_has_the_arguments_of_both_wrappers():
    assert keys(OptimWrapperCfg) == arguments(OptimWrapper, AmpOptimWrapper) | {"type", "paramwise_cfg", "constructor"}


def test_a_dataloader_has_the_arguments_that_tell_one_from_several():
    assert keys(LoaderCfg) == _LOADER_ARGUMENTS


def test_the_default_hooks_have_their_names():
    assert keys(DefaultHooks) == {*DEFAULT_HOOKS, *_NOTEBOOK_HOOKS}


@pytest.mark.parametrize(("kind", "settings"), [(TrainCfg, TrainSettings), (EvaluationCfg, EvalSettings)])
def test_settings_have_the_types_that_their_dataclass_checks(kind, settings):
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: field.type for field in dataclasses.fields(settings)}
    assert {name: hints[name] for name in fields} == fields


def test_a_typed_section_is_a_plain_dict():
    assert TrainCfg(max_epochs=2) == dict(max_epochs=2)
    assert type(TrainCfg(max_epochs=2)) is dict
