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


@pytest.mark.parametrize(("names", "warned"), [(("a", "b", "c"), []), (None, ["train", "val", "test"])])
def test_the_number_of_classes_of_the_data_is_accepted_with_a_warning_if_they_have_none(names, warned, recwarn):
    model = LinenModel(Head(num_classes=3), loss=lambda outputs, batch: outputs)
    hook = ClassNumCheckHook()
    for stage in ("train", "val", "test"):
        getattr(hook, f"before_{stage}")(runner_with_classes(names, model))
    assert [str(warning.message).partition(" data have no `classes`")[0].split()[-1] for warning in recwarn] == warned


def test_a_proposal_head_is_not_checked_and_a_cycle_ends():
    head = types.SimpleNamespace(num_classes=7)
    model = types.SimpleNamespace(heads=[head], rpn_head=types.SimpleNamespace(num_classes=1))
    model.itself = model
    ClassNumCheckHook().before_train(runner_with_classes(tuple("abcdefg"), model))


def test_mmdetections_name_works_too():
    assert HOOKS.get("NumClassCheckHook") is ClassNumCheckHook
