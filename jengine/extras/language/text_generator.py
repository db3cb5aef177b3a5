"""Model that generates text: in predictions, in evaluations, and for samples during training."""

import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import jax
import numpy as np
from flax import linen as nn

from jengine.config.annotations import ConfigOf, Count, Fraction, NonNegative
from jengine.config.errors import ConfigError
from jengine.config.registry import MODELS
from jengine.extras.language.chat import ChatTemplate
from jengine.extras.language.generation import check_length, check_sampling, generate
from jengine.extras.language.prompts import Prompts
from jengine.extras.language.records import Source
from jengine.extras.language.tokenizers import TokenizerLike, build_tokenizer, decode_text
from jengine.extras.networks.transformer import TransformerLM
from jengine.model.linen import LinenModel
from jengine.model.model import Batch, Model, ModelState, ModelWrapper, Params, PyTree, get_model


@MODELS.register_module()
class TextGenerator(ModelWrapper):
    """Language model whose predictions for prompts are generated tokens.

    For other batches they are its logits.

    Prompts are batches with the entries `prompt` and `prompt_length`, as in the dataset `Prompts`.
    Losses and checkpoints are the inner model's.

    >>> inner = dict(
    ...     type="LinenModel",
    ...     module=dict(type="TransformerLM", vocab_size=257),
    ...     inputs="tokens",
    ...     loss=dict(type="CrossEntropy", label="targets"),
    ... )
    >>> model = TextGenerator(inner, tokenizer="bytes", max_new_tokens=8)
    >>> params, state = model.init(jax.random.key(0), {"tokens": np.zeros((1, 4), int)})
    >>> model.predict(params, state, model.make_prompts(["hello", "a"]).arrays).shape
    (2, 8)

    Args:
      model: a `LinenModel` with a `TransformerLM`, an `NnxModel` with an `nnx_transformer`, or a
        config; its inputs are `tokens`, also with `segment_ids` and `positions`.
      tokenizer: 'bytes', the path to a tokenizer file or Hub directory, or a tokenizer.
      max_new_tokens: how many tokens to add to a prompt, fewer if the text ends.
      temperature, top_k, top_p: see `generate`. With a temperature above 0, each evaluation batch
        has its own key, which does not depend on the training.
      template, response, chat_template: see `TextFormat`; None for the tokenizer's chat template.

    Raises:
      ConfigError: another module, or a tokenizer with more tokens than the model.
      ValueError: settings that `generate` refuses.
    """

    keeps_variables = True

    def __init__(
        self,
        model: Annotated[Any, ConfigOf(MODELS)],
        tokenizer: TokenizerLike,
        max_new_tokens: Count = 64,
        temperature: NonNegative = 0.0,
        top_k: Count | None = None,
        top_p: Fraction | None = None,
        template: str = "{prompt}",
        response: str = "response",
        chat_template: ChatTemplate | str | None = None,
    ) -> None:
        super().__init__(model)
        self.tokenizer = build_tokenizer(tokenizer)
        self.max_new_tokens = max_new_tokens
        self._module = _find_transformer(self.model)  # None for an NNX module, which is made later
        if self._module is not None:
            if self.tokenizer.vocab_size > self._module.vocab_size:
                raise ConfigError(
                    f"TextGenerator: `tokenizer` must have at most the {self._module.vocab_size} "
                    f"tokens of the model, got {self.tokenizer.vocab_size}; set `vocab_size` of "
                    "the module, or take the model's tokenizer"
                )
            check_sampling(self._module.vocab_size, temperature, top_k, top_p)
        # Greedy decoding needs no key, so that predictions are equal for every seed.
        self._is_random = temperature > 0
        self._generate = functools.partial(
            generate,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            stop_token=tuple(self.tokenizer.end_tokens),
        )
        self._make_prompts = functools.partial(
            Prompts,
            tokenizer=self.tokenizer,
            template=template,
            response=response,
            chat_template=chat_template,
        )

    @property
    def predicts_with_rng(self) -> bool:
        """Whether tokens are drawn, or the inner model's predictions are."""
        return self._is_random or self.model.predicts_with_rng

    def init(self, rng: jax.Array, batch: Batch) -> tuple[PyTree, PyTree]:
        """Initialize the inner model, also for a prompt batch."""
        return self.model.init(rng, _as_rows(batch) if _is_prompts(batch) else batch)

    def predict(
        self, params: Params, model_state: ModelState, batch: Batch, *, rng: jax.Array | None = None
    ) -> PyTree:
        """Return int32[B, max_new_tokens], the tokens after the prompts.

        Or the inner model's predictions.
        """
        if not _is_prompts(batch):
            return super().predict(params, model_state, batch, rng=rng)
        module = get_model(self.model).merge(params, model_state)
        weights = None  # those in an NNX module
        if isinstance(module, nn.Module):
            module, variables = module.unbind()
            weights = variables["params"]
        return self._generate(
            module,
            weights,
            batch["prompt"],
            self.max_new_tokens,
            lengths=batch["prompt_length"],
            rng=rng if self._is_random else None,
        )

    def merge(self, params: Params, model_state: ModelState, *, train: bool = False) -> Any:
        """Return the inner model's module."""
        return self.model.merge(params, model_state, train=train)

    def make_prompts(self, source: Source, length: int | None = None) -> Prompts:
        """Return the prompts in a file or records; see `Prompts`.

        Raises:
          ValueError: prompts and new tokens do not fit into the model's learned positions.
        """
        prompts: Prompts = self._make_prompts(source, length=length)
        if self._module is not None:
            check_length(self._module, prompts.arrays["prompt"].shape[1] + self.max_new_tokens)
        return prompts

    def decode(self, tokens: Iterable[Any]) -> list[str]:
        """Decode predictions, int[B, N], each up to its end."""
        return [decode_text(self.tokenizer, row) for row in tokens]


def find_generator(model: Model) -> TextGenerator | None:
    """Return the `TextGenerator` among a model and those in it; None if there is none."""
    while not isinstance(model, TextGenerator):
        if not isinstance(model, ModelWrapper):
            return None
        model = model.model
    return model


def _find_transformer(model: Model) -> TransformerLM | None:
    while isinstance(model, ModelWrapper):
        model = model.model
    if not isinstance(model, LinenModel):
        return None
    if not isinstance(model.module, TransformerLM):
        raise ConfigError(
            "TextGenerator: `model.module` must be a TransformerLM, got "
            f"{type(model.module).__name__}"
        )
    return model.module


def _is_prompts(batch: Batch) -> bool:
    return isinstance(batch, Mapping) and "prompt" in batch


def _as_rows(batch: Batch) -> dict[str, Any]:
    """Return a prompt batch as a text batch with the same token shape."""
    tokens = batch["prompt"]
    return {
        "tokens": tokens,
        "segment_ids": tokens * 0 + 1,
        "positions": tokens * 0 + np.arange(tokens.shape[1]),
    }
