"""Train with the Trainer of Hugging Face's transformers on PyTorch."""

import torch
import transformers

from benchmarks.peers.whole import torch_models
from benchmarks.peers.whole.tasks import read_arguments, write_result

name, task, data, directory = read_arguments()
transformers.logging.set_verbosity_error()


class Wrapped(torch.nn.Module):
    """Return the loss and the scores, as the Trainer expects."""

    def __init__(self):
        super().__init__()
        self.net = torch_models.NETWORKS[name]()
        self.loss = torch_models.make_loss(task)

    def forward(self, x, labels):
        """Return `loss` and `logits` (in evaluations, a sum for each batch)."""
        logits = self.net(x)
        if self.training:
            return dict(loss=self.loss(logits, labels))
        score = torch_models.score(logits, labels, name)
        return dict(loss=self.loss(logits, labels), logits=score[None])


class Trainer(transformers.Trainer):
    """Take batches as they are: the data has made them."""

    def get_train_dataloader(self):
        """Return the training batches."""
        return torch.utils.data.DataLoader(
            torch_models.Batches(data, task), batch_size=None, collate_fn=name_fields
        )

    def get_eval_dataloader(self, eval_dataset=None):
        """Return the batches of the test data."""
        return torch.utils.data.DataLoader(
            torch_models.TestBatches(data), batch_size=None, collate_fn=name_fields
        )


def name_fields(batch):
    """Return the fields of a batch by the model's names."""
    x, y = batch
    return dict(x=x, labels=y)


torch.manual_seed(0)
model = Wrapped()
arguments = transformers.TrainingArguments(
    output_dir=str(directory),
    max_steps=task.steps,
    per_device_train_batch_size=task.batch,
    max_grad_norm=1.0,
    eval_strategy="steps",
    eval_steps=task.val_every,
    save_steps=task.save_every,
    save_total_limit=2,
    logging_steps=task.log_every,
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    remove_unused_columns=False,
    label_names=["labels"],
    seed=0,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=torch_models.Batches(data, task),
    eval_dataset=torch_models.TestBatches(data),
    optimizers=torch_models.make_optimizer(model, task),
    compute_metrics=lambda output: {"metric": output.predictions.sum() / data.test[1].size},
)
trainer.train()
metrics = [line["eval_metric"] for line in trainer.state.log_history if "eval_metric" in line]
write_result(directory, metrics[-1])
