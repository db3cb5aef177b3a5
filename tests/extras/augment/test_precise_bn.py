import math
import types

from jengine.extras.augment import PreciseBNHook


def test_statistics_are_due_only_in_an_iteration_loop():
    hook = PreciseBNHook(num_samples=8, interval=3)
    for by_epoch, due in ((True, math.inf), (False, 2)):
        runner = types.SimpleNamespace(iter=0, train_loop=types.SimpleNamespace(by_epoch=by_epoch))
        assert hook.next_step(runner, 0) == due
