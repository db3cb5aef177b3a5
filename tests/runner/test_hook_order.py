import pathlib

GOLDEN = pathlib.Path(__file__).parent.parent / "data" / "hook_order.txt"

HOOKS = [
    dict(type="NaiveVisualizationHook"),
    dict(type="EarlyStoppingHook", monitor="loss", min_delta=0.0),
    dict(type="EMAHook"),
    dict(type="NumericsGuardHook"),
    dict(type="EmptyCacheHook"),
    dict(type="SyncBuffersHook"),
    dict(type="CheckInvalidLossHook"),
    dict(type="MemoryProfilerHook", priority="LOW"),
    dict(type="ProfilerHook"),
    dict(type="PrepareTTAHook", tta_cfg=dict(type="BaseTTAModel"), priority=45),
    dict(type="SetEpochInfoHook", priority="VERY_HIGH"),
    dict(type="WarmupParamHook", param_name="loss_lambda", value=1.0, warmup_epochs=1),
    dict(type="ClassNumCheckHook"),
    dict(type="PreciseBNHook"),
]


def test_twenty_hooks_run_in_the_recorded_order(make_runner):
    runner = make_runner(default_hooks=None, custom_hooks=HOOKS)
    assert len(runner.hooks) == 20
    order = "\n".join(line.rstrip() for line in runner.get_hooks_info().splitlines()) + "\n"
    assert order == GOLDEN.read_text()
