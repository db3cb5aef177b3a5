import types

import flax.linen as nn
import pytest

from jengine.config import HOOKS
from jengine.extras.diagnose import ClassNumCheckHook
from jengine.model import LinenModel


class Head(nn.Module):
    num_classes: int


def runner_with_classes(names, model):
    loader = types.SimpleNamespace(metainfo=None if names is None else dict(classes=names))
    return types.SimpleNamespace(model=model, train_dataloader=loader, val_dataloader=loader, test_dataloader=loader)


def test_the_number_of_classes_of_the_data_is_accepted():
    model = LinenModel(Head(num_classes=3), loss=lambda outputs, batch: outputs)
    hook = ClassNumCheckHook()
    for stage in ("before_train", "before_val", "before_test"):
        getattr(hook, stage)(runner_with_classes(("a", "b", "c"), model))
    with pytest.warns(UserWarning, match="the train data have no `classes`"):
        hook.before_train(runner_with_classes(None, model))


def test_a_proposal_head_is_not_checked_and_a_cycle_ends():
    head = types.SimpleNamespace(num_classes=7)
    model = types.SimpleNamespace(heads=[head], rpn_head=types.SimpleNamespace(num_classes=1))
    model.itself = model
    ClassNumCheckHook().before_train(runner_with_classes(tuple("abcdefg"), model))


def test_mmdetections_name_works_too():
    assert HOOKS.get("NumClassCheckHook") is ClassNumCheckHook
