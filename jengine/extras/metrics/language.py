"""Metrics for language models and for generated text."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.errors import require_extra
from jengine.config.registry import METRICS
from jengine.data.host_entries import Batch
from jengine.evaluation.metric import (
    HostMetric,
    Mean,
    PairMetric,
    Predictions,
    element_mask,
    example_mask,
)
from jengine.model.autocast import at_least_float32
from jengine.model.labels import require_class_indices
from jengine.model.selection import Selector, describe_array, select_array


@METRICS.register_module()
class Perplexity(PairMetric):
    """Language-model perplexity, `perplexity`: e to the mean cross-entropy per token.

    The mean is over all tokens, not over batches. A label outside [0, V) makes the result NaN.

    >>> metric = Perplexity()
    >>> state = metric.update(
    ...     metric.init(), jnp.zeros((2, 3, 8)), {"label": jnp.zeros((2, 3), jnp.int32)}
    ... )
    >>> round(metric.compute(state)["perplexity"], 4)
    8.0

    Args:
      label: name, index or dotted path of the batch entry with the next tokens, int[B, T].
      prediction: the prediction entry with logits float[B, T, V]; None if the predictions are an
        array.
      ignore_index: label that marks tokens to leave out; None for no such label.
      prefix: prefix for the result name, none by default.
    """

    names: tuple[str, ...] = ("perplexity",)

    def __init__(
        self,
        label: Selector = "label",
        prediction: Selector | None = None,
        ignore_index: int | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(label, prediction, prefix)
        self.ignore_index = ignore_index

    def init(self) -> Mean:
        """Return an empty mean."""
        return Mean.zero()

    def update(self, state: Mean, predictions: Predictions, batch: Batch) -> Mean:
        """Return the mean with a batch added."""
        losses, is_counted = self._token_losses(predictions, batch)
        return state.add(losses.sum(), is_counted.sum())

    def compute(self, state: Mean) -> dict[str, float]:
        """Return the perplexity; infinity if it is larger than a float."""
        loss = state.value()
        # `math.exp` raises OverflowError above 709.78. `not >`: NaN stays NaN.
        return {"perplexity": math.exp(loss) if not loss > 709 else math.inf}

    def _token_losses(self, predictions: Predictions, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Return each token's cross-entropy, 0 where it does not count, and where it counts."""
        name = type(self).__name__
        logits, labels = self.select(predictions, batch)
        if logits.shape[:-1] != labels.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
            raise ValueError(
                f"{name}: predictions must be logits float[B, T, V] and labels int[B, T], got "
                f"{describe_array(logits)} and {describe_array(labels)}"
            )
        vocabulary = logits.shape[-1]
        require_class_indices(labels, vocabulary, f"{name}.label", self.ignore_index)
        labels = jnp.asarray(labels)
        is_counted = element_mask(batch, labels, self.ignore_index)
        labels = labels.astype(jnp.int32)
        logits = at_least_float32(jnp.asarray(logits))
        # An index and not a product with one_hot, which has the size of the logits.
        true = jnp.take_along_axis(logits, jnp.clip(labels, 0, vocabulary - 1)[..., None], axis=-1)[
            ..., 0
        ]
        losses = jax.nn.logsumexp(logits, axis=-1) - true
        # they have been clipped
        losses = jnp.where((labels >= 0) & (labels < vocabulary), losses, jnp.nan)
        return jnp.where(is_counted, losses, 0.0), is_counted


@METRICS.register_module()
class BitsPerByte(Perplexity):
    """Language-model bits per byte, `bits_per_byte`, which does not depend on the tokenizer.

    >>> metric = BitsPerByte()
    >>> batch = {"label": jnp.zeros((1, 4), jnp.int32), "num_bytes": jnp.array([6])}
    >>> round(
    ...     metric.compute(metric.update(metric.init(), jnp.zeros((1, 4, 8)), batch))[
    ...         "bits_per_byte"
    ...     ],
    ...     4,
    ... )
    2.0

    Args:
      num_bytes: the batch entry with the number of bytes, int[B] of each text, or int[B, T] of each
        label.
      label, prediction, ignore_index, prefix: see `Perplexity`.
    """

    names = ("bits_per_byte",)

    def __init__(
        self,
        num_bytes: Selector = "num_bytes",
        label: Selector = "label",
        prediction: Selector | None = None,
        ignore_index: int | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(label, prediction, ignore_index, prefix)
        self.num_bytes = num_bytes

    def update(self, state: Mean, predictions: Predictions, batch: Batch) -> Mean:
        """Return the sums with a batch added."""
        losses, is_counted = self._token_losses(predictions, batch)
        num_bytes = jnp.asarray(
            select_array(batch, self.num_bytes, "BitsPerByte.num_bytes", "batch")
        )
        counts = is_counted if num_bytes.ndim == losses.ndim else example_mask(batch)
        if num_bytes.shape != counts.shape:
            raise ValueError(
                "`BitsPerByte.num_bytes` must be int[B] or have the shape of the labels "
                f"{list(losses.shape)}, got {describe_array(num_bytes)}"
            )
        # From nats to bits.
        return state.add(losses.sum() / math.log(2), jnp.where(counts, num_bytes, 0).sum())

    def compute(self, state: Mean) -> dict[str, float]:
        """Return bits per byte."""
        return {"bits_per_byte": state.value()}


@METRICS.register_module()
class BLEU(PairMetric, HostMetric):
    """Corpus BLEU by sacrebleu, `bleu`, from 0 to 100.

    Args:
      reference: the batch entry with the reference texts: strings, [B] or [B, R] for several, or
        what `decode` takes.
      prediction: the prediction entry, for each example what `decode` takes; None if the
        predictions are an array.
      decode: function from one example's array of tokens to a string.
      tokenize: sacrebleu's tokenizer, '13a' by default; 'zh', 'ja-mecab', 'char', 'none' ...
      lowercase: ignore case.
      prefix: prefix for the result name, none by default.

    Examples:
      >>> words = np.array(["the", "cat", "is", "here"])
      >>> metric = BLEU(decode=lambda tokens: " ".join(words[tokens]))  # doctest: +SKIP
      >>> metric.process(
      ...     {"reference": np.array(["the cat is here"])}, np.array([[0, 1, 2, 3]])
      ... )  # doctest: +SKIP
      >>> metric.collect(None)["bleu"]  # doctest: +SKIP
      100.0
    """

    extra = "bleu"
    names = ("bleu",)

    def __init__(
        self,
        reference: Selector = "reference",
        prediction: Selector | None = None,
        decode: Callable[[Any], str] = str,
        tokenize: str | None = None,
        lowercase: bool = False,
        prefix: str | None = None,
    ) -> None:
        with require_extra("bleu", "BLEU requires sacrebleu"):
            import sacrebleu
        super().__init__(reference, prediction, prefix)
        self.decode = decode
        self._bleu = sacrebleu.metrics.BLEU(tokenize=tokenize, lowercase=lowercase)

    def process(self, data_batch: Batch, data_samples: Predictions) -> None:
        """Keep the texts of a batch."""
        predictions, references = self.select(data_samples, data_batch)
        for prediction, reference in zip(predictions, references, strict=True):
            entry = np.atleast_1d(reference)
            texts = (
                [str(text) for text in entry]
                if entry.dtype.kind in "OU"
                else [self.decode(reference)]
            )
            self.results.append((self.decode(prediction), texts))

    def compute_metrics(self, results: list[Any]) -> dict[str, float]:
        """Return the corpus score."""
        predictions, references = zip(*results, strict=True)
        # sacrebleu takes the first references of all texts, then the second ones ...; None where a
        # text has fewer
        count = max(map(len, references))
        columns = [
            [texts[i] if i < len(texts) else None for texts in references] for i in range(count)
        ]
        return {"bleu": float(self._bleu.corpus_score(list(predictions), columns).score)}
