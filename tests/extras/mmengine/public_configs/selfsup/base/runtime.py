"""Keys and values of MMSelfSup's default_runtime."""

default_scope = "mmselfsup"
default_hooks = dict(
    runtime_info=dict(type="RuntimeInfoHook"),
    timer=dict(type="IterTimerHook"),
    logger=dict(type="LoggerHook", interval=50),
    param_scheduler=dict(type="ParamSchedulerHook"),
    checkpoint=dict(type="CheckpointHook", interval=10),
    sampler_seed=dict(type="DistSamplerSeedHook"),
)
env_cfg = dict(
    cudnn_benchmark=False, mp_cfg=dict(mp_start_method="fork", opencv_num_threads=0), dist_cfg=dict(backend="nccl")
)
log_processor = dict(window_size=10, custom_cfg=[dict(data_src="", method="mean", window_size="global")])
vis_backends = [dict(type="LocalVisBackend")]
visualizer = dict(type="SelfSupVisualizer", vis_backends=vis_backends, name="visualizer")
log_level = "INFO"
load_from = None
resume = False
