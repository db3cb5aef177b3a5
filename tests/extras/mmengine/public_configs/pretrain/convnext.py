"""Keys and values of MMPretrain's convnext-tiny_32xb128_in1k."""

_base_ = ["base/network.py", "base/images.py", "base/schedule.py", "base/runtime.py"]

train_dataloader = dict(batch_size=128)
optim_wrapper = dict(optimizer=dict(lr=4e-3), clip_grad=None)
custom_hooks = [dict(type="EMAHook", momentum=1e-4, priority="ABOVE_NORMAL")]
auto_scale_lr = dict(base_batch_size=4096)
