dataset_type = "VQADATASET"
model = dict(type="LXMERT", params=dict(max_seq_length=20, num_labels=3129))
loss = dict(type="LogitBinaryCrossEntropy")
train_data = dict(
    samples_per_gpu=32,
    workers_per_gpu=0,
    data=dict(type=dataset_type, reader=dict(name="VQAReader"), limit_nums=None),
    sampler="DefaultSampler",
)
test_data = dict(samples_per_gpu=64, data=dict(type=dataset_type, reader=dict(name="VQAReader"), is_train=False))
optimizer = dict(type="BertAdam", lr=5e-5, weight_decay=0.01, training_encoder_lr_multiply=1)
optimizer_config = dict(grad_clip=dict(max_norm=5))
lr_config = dict(policy="BertWarmupLinearLR", warmup=0.1, max_iters=55472)
total_epochs = 4
checkpoint_config = dict(epoch_period=1)
log_config = dict(period=100)
seed = 9595
dist_params = dict(backend="nccl")
workflow = [("train", 1)]
load_from = "data/lxmert_pretrained.pth"
