"""Decoder-only transformer for language modelling, as a Linen module."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from jengine.config.annotations import Count, Index, Positive
from jengine.config.registry import MODELS
from jengine.extras.networks.activations import ACTIVATIONS, Activation
from jengine.extras.networks.attention import attend, attend_with_mask
from jengine.extras.networks.constrain import BATCH, CONTEXT, constrain
from jengine.extras.networks.logits import ChunkedLogits, cap_values
from jengine.extras.networks.mixture import MixtureOfExperts
from jengine.extras.networks.rotary import ROTARY_BASE, RotaryScaling, make_scaling, rotate
from jengine.parallel.pjit import HOST_MEMORY

# axes of the mesh over which the width of the embedding is sharded
_WIDTH = (CONTEXT, "fsdp", "expert", "tensor")

Norm = Literal["rms", "rms_plus_one", "layer"]
BLOCK_INPUT = "block_input"  # name of the arrays that the policy 'offload' keeps on the host
RematPolicy = Literal[
    "offload",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "everything_saveable",
    "nothing_saveable",
]


@dataclasses.dataclass(frozen=True)
class BlockSettings:
    """Block sizes and variants: see `TransformerLM`. Without `rotary_base`, nothing is rotated."""

    heads: int
    kv_heads: int
    head_size: int
    mlp_width: int
    rotary_base: float | None
    rotary_scaling: RotaryScaling | None
    window: int | None
    full_blocks: Sequence[int]
    local_rotary_base: float | None
    attention_scale: float
    attention_cap: float | None
    query_key_norm: bool
    norm: Norm
    norm_epsilon: float
    post_norm: bool
    mlp: Literal["gated", "plain"]
    activation: Activation
    attention_bias: bool
    out_bias: bool
    mlp_bias: bool
    experts: int | None
    experts_per_token: int
    cache_length: int | None

    def make_norm(self, name: str) -> nn.Module:
        """Return a norm."""
        return _NORMS[self.norm](self.norm_epsilon, name=name)

    def choose(self, is_full: bool) -> "BlockSettings":
        """Return the settings for a block in `full_blocks`, or for one that is not."""
        if is_full:
            return dataclasses.replace(self, window=None)
        if self.local_rotary_base is None:
            return self
        return dataclasses.replace(self, rotary_base=self.local_rotary_base, rotary_scaling=None)


class PlusOneRMSNorm(nn.Module):
    """RMSNorm with the factor 1 + `scale`, so weight decay pulls the factor to 1."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return f[..., D] for `x` f[..., D]."""
        scale = self.param("scale", nn.initializers.zeros, (x.shape[-1],))
        normed = nn.RMSNorm(self.epsilon, use_scale=False)(x).astype(jnp.float32)
        # In float32, as 1 + scale has fewer digits of the scale in bfloat16.
        y = normed * (1 + scale.astype(jnp.float32))
        return y.astype(jnp.result_type(x, scale))


_NORMS: dict[Norm, Callable[..., nn.Module]] = {
    "rms": nn.RMSNorm,
    "rms_plus_one": PlusOneRMSNorm,
    "layer": nn.LayerNorm,
}


class TokenContext(NamedTuple):
    """What attention reads about tokens besides their values."""

    positions: jax.Array | None  # int[B, T] in the sequence; None for 0, 1, ...
    segment_ids: jax.Array | None  # int[B, T]; None for one sequence in each row


class CausalAttention(nn.Module):
    """Attention to earlier positions."""

    settings: BlockSettings

    @nn.compact
    def __call__(
        self, x: jax.Array, context: TokenContext, is_full: jax.Array | None = None
    ) -> jax.Array:
        """Return tokens f[B, T, D] for tokens `x` f[B, T, D].

        `is_full`, bool[], says whether a block in a scan is one of `full_blocks`; None if the
        settings are those of this block.
        """
        settings = self.settings

        def project(name: str, heads: int) -> jax.Array:
            return nn.DenseGeneral(
                (heads, settings.head_size), use_bias=settings.attention_bias, name=name
            )(x)

        def run(part: Callable[..., Any], *arrays: jax.Array) -> Any:
            if is_full is None:
                return part(settings, *arrays)
            kinds = [functools.partial(part, settings.choose(kind)) for kind in (True, False)]
            return jax.lax.cond(is_full, *kinds, *arrays)

        # In this order the backward pass ends with the gradient by the values, whose kernel it has
        # waited for least.
        value = project("value", settings.kv_heads)
        key = project("key", settings.kv_heads)
        query = project("query", settings.heads)
        if settings.query_key_norm:
            key = settings.make_norm("key_norm")(key)
            query = settings.make_norm("query_norm")(query)
        # Values are not rotated: positions matter for whom a token attends to, not for what it
        # gets.
        scale = settings.attention_scale
        if settings.rotary_base is not None:
            query, key = run(functools.partial(_rotate, context.positions), query, key)
            scale = 1.0
        if settings.cache_length is None:
            part = functools.partial(_attend, context.segment_ids, scale)
            y = run(part, query, key, value)
        else:
            positions = context.positions
            if positions is None:
                positions = jnp.broadcast_to(jnp.arange(query.shape[1]), query.shape[:2])
            keys = self._store("cached_key", key, positions)
            values = self._store("cached_value", value, positions)
            y = run(functools.partial(_attend_to_cache, positions, scale), query, keys, values)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), use_bias=settings.out_bias, name="out")(
            y
        )

    def _store(self, name: str, new: jax.Array, positions: jax.Array) -> jax.Array:
        """Write keys or values to the cache at the positions, and return the cache."""
        rows = jnp.arange(new.shape[0])[:, None]
        shape = (new.shape[0], self.settings.cache_length, *new.shape[2:])
        cache = self.variable("cache", name, jnp.zeros, shape, new.dtype)
        cache.value = constrain(cache.value.at[rows, positions].set(new), BATCH, None, "tensor")
        return cache.value


def _rotate(
    positions: jax.Array | None, settings: BlockSettings, query: jax.Array, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    assert settings.rotary_base is not None
    rotation = settings.rotary_base, settings.rotary_scaling, positions
    return rotate(query, *rotation, scale=settings.attention_scale), rotate(key, *rotation)


def _attend(
    segment_ids: jax.Array | None,
    scale: float,
    settings: BlockSettings,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> jax.Array:
    return attend(
        query,
        key,
        value,
        segment_ids=segment_ids,
        window=settings.window,
        scale=scale,
        cap=settings.attention_cap,
    )


def _attend_to_cache(
    positions: jax.Array,
    scale: float,
    settings: BlockSettings,
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """Attend to all entries up to the positions int[B, T]."""
    # Entries after the position are padding of the prompt or still empty; later tokens overwrite
    # them.
    length = keys.shape[1]
    distance = positions[:, :, None] - jnp.arange(length)
    mask = (distance >= 0) & (distance < (settings.window or length))
    return attend_with_mask(query, keys, values, mask[:, None], scale, settings.attention_cap)


class MLP(nn.Module):
    """Hidden layer: `down(act(up(x)))`, or gated `down(act(gate(x)) * up(x))`."""

    settings: BlockSettings

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return tokens f[B, T, D] for tokens `x` f[B, T, D]."""
        settings = self.settings
        activate = ACTIVATIONS[self.settings.activation]

        def dense(size: int, name: str, x: jax.Array) -> jax.Array:
            return nn.Dense(size, use_bias=settings.mlp_bias, name=name)(x)

        if settings.mlp == "gated":
            hidden = activate(dense(settings.mlp_width, "gate", x)) * dense(
                settings.mlp_width, "up", x
            )
        else:
            hidden = activate(dense(settings.mlp_width, "up", x))
        return dense(x.shape[-1], "down", hidden)


class DecoderBlock(nn.Module):
    """Pre-norm transformer block with the form that `nn.scan` requires."""

    settings: BlockSettings

    @nn.compact
    def __call__(
        self, x: jax.Array, context: TokenContext, is_full: jax.Array | None = None
    ) -> tuple[jax.Array, None]:
        """Return tokens f[B, T, D] for tokens `x` f[B, T, D], and None, a layer's output.

        `is_full`: see `CausalAttention`.
        """
        settings = self.settings

        def end(name: str, y: jax.Array) -> jax.Array:
            return settings.make_norm(name)(y) if settings.post_norm else y

        x = checkpoint_name(constrain(x, BATCH, CONTEXT), BLOCK_INPUT)
        y = CausalAttention(settings, name="attn")(
            settings.make_norm("attn_norm")(x), context, is_full
        )
        x = x + end("attn_post_norm", y)
        hidden = settings.make_norm("mlp_norm")(x)
        if settings.experts is None:
            y = MLP(settings, name="mlp")(hidden)
        else:
            y = MixtureOfExperts(
                settings.experts, settings.experts_per_token, settings.mlp_width, name="experts"
            )(hidden)
        return x + end("mlp_post_norm", y), None


@MODELS.register_module()
class TransformerLM(nn.Module):
    """Decoder-only transformer, which predicts the next token.

    The defaults are Llama's. `norm="layer", mlp="plain", activation="gelu_tanh",
    positions="learned", bias=True, tied=True` is GPT-2;
    `jengine.extras.weights.transformer_arguments` reads these from a Hugging Face `config.json`.

    The blocks are one `nn.scan` over parameters that are stacked along a leading axis, [depth,
    ...], so the compile time does not grow with the depth. On a mesh, tokens stay sharded by
    examples: without that constraint XLA may shard them like the parameters, and exchange tokens
    instead of parameters.

    >>> model = TransformerLM(vocab_size=32, width=8, heads=2, mlp_width=16)
    >>> jax.eval_shape(model.init_with_output, jax.random.key(0), jnp.zeros((1, 4), int))[0].shape
    (1, 4, 32)

    Attributes:
      vocab_size: vocabulary size in tokens.
      width: token width.
      depth: block count.
      heads: attention heads per block, each with an even width.
      mlp_width: hidden MLP width.
      remat: whether the backward pass computes each block again instead of keeping intermediate
        results, which takes about a third more computation; only block inputs are kept. Or a name
        in `jax.checkpoint_policies` for what is kept too, such as
        'dots_with_no_batch_dims_saveable' for products with parameters; or 'offload', which keeps
        the block inputs in host memory.
      scan: whether the blocks are one `nn.scan`; False for parameters `layers_0`, `layers_1`, ...
        per block.
      kv_heads: key and value heads, each for several query heads; None for as many as `heads`.
      head_size: head width; None for `width / heads`.
      window: how many tokens a token attends to, itself included; None for all earlier ones.
      full_blocks: numbers of the blocks that attend to all earlier tokens although the others have
        a `window`.
      positions: 'rotary', or 'learned': an embedding for `max_length` positions is added to the
        token embedding.
      max_length: the most tokens with learned positions.
      rotary_base: ratio of the longest to the shortest wavelength.
      local_rotary_base: that ratio in blocks with a `window`, which then have no `rotary_scaling`;
        None for no difference.
      rotary_scaling: wavelength scaling for a longer context: `dict(kind='linear', factor=4)`, or
        the attributes from `Llama3Scaling` or `YarnScaling` in `jengine.extras.networks.rotary`
        with the `kind` 'llama3' or 'yarn'.
      attention_scale: factor for attention scores; None for `head_size**-0.5`.
      attention_cap: bound for attention scores, `cap * tanh(score / cap)`; None for none.
      query_key_norm: whether queries and keys are normed over the head size.
      norm: 'rms' for RMSNorm, 'rms_plus_one' for RMSNorm with the factor `1 + scale`, 'layer' for
        LayerNorm.
      norm_epsilon: number added to the variance in norms.
      post_norm: whether the outputs of attentions and MLPs are normed too, before they are added.
      mlp: 'gated' for `down(act(gate(x)) * up(x))`, 'plain' for `down(act(up(x)))`.
      activation: nonlinearity in the MLP; 'gelu_tanh' is the approximate GELU.
      bias: whether projections have a bias; 'attention' or 'mlp' for only those in attentions or
        MLPs, 'qkv' for only those to queries, keys and values.
      embed_scale: factor for token embeddings at the input; None for 1.
      tied: whether the embedding is also the output layer.
      logits_cap: bound for logits, `cap * tanh(logit / cap)`; None for none.
      experts: MLPs in each block, where a token uses `experts_per_token`; None for one that all
        use. They sow a balance loss: see `jengine.extras.networks.mixture.MixtureOfExperts`.
      experts_per_token: how many MLPs a token uses.
      cache_length: capacity in tokens for the key and value caches, the collection `cache`, which
        each call writes at its positions and attends to; None for no caches. See
        `jengine.extras.language.generate`.
      logits_chunk: tokens per example for which the loss computes logits at a time, in training:
        less memory if the vocabulary is large, for computing the logits twice. None for all. The
        loss must know `jengine.extras.networks.logits.ChunkedLogits`, as `CrossEntropy` does.

    Sources: Vaswani et al. 2017 (transformer); Zhang and Sennrich 2019 (RMSNorm); Shazeer 2020
    (gated MLP); Su et al. 2021 (rotary position embedding); Ainslie et al. 2023 (shared keys and
    values); Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama).
    """

    vocab_size: Count
    width: Count = 64
    depth: Count = 2
    heads: Count = 4
    mlp_width: Count = 192
    remat: bool | RematPolicy = True
    scan: bool = True
    kv_heads: Count | None = None
    head_size: Count | None = None
    window: Count | None = None
    full_blocks: tuple[Index, ...] = ()
    positions: Literal["rotary", "learned"] = "rotary"
    max_length: Count | None = None
    rotary_base: Positive = ROTARY_BASE
    local_rotary_base: Positive | None = None
    rotary_scaling: Mapping[str, str | float | bool] | None = None
    attention_scale: Positive | None = None
    attention_cap: Positive | None = None
    query_key_norm: bool = False
    norm: Norm = "rms"
    norm_epsilon: Positive = 1e-6
    post_norm: bool = False
    mlp: Literal["gated", "plain"] = "gated"
    activation: Activation = "silu"
    bias: bool | Literal["attention", "mlp", "qkv"] = False
    embed_scale: Positive | None = None
    tied: bool = False
    logits_cap: Positive | None = None
    experts: Count | None = None
    experts_per_token: Count = 2
    cache_length: Count | None = None
    logits_chunk: Count | None = None

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        train: bool = False,
    ) -> jax.Array | ChunkedLogits:
        """Return logits f[B, T, vocab_size] for the token after each.

        Args:
          tokens: int[B, T]; others than 0 to vocab_size - 1 make the logits NaN, which ends a run
            with a message.
          segment_ids: int[B, T], the number for the packed sequence that a token belongs to; None
            for one in each row.
          positions: int[B, T], positions in the sequences; None for 0, 1, ... in each row.
          train: whether the logits are for the loss, which computes them itself with
            `logits_chunk`.

        Raises:
          ValueError: sizes that do not divide each other, or more tokens than learned positions.
        """
        settings = self.make_settings()
        context = TokenContext(positions, segment_ids)
        embed = nn.Embed(
            self.vocab_size, self.width, embedding_init=nn.initializers.normal(0.02), name="embed"
        )
        x = _look_up(embed.embedding, tokens)
        if self.embed_scale is not None:
            x = x * jnp.asarray(self.embed_scale, x.dtype)
        if self.positions == "learned":
            x = x + self._embed_positions(tokens.shape[1], positions)
        if (check := getattr(tokens, "check_tokens", None)) is not None:  # as labels are checked
            check(self.vocab_size, "TransformerLM.tokens")
        # JAX would take the last token of the vocabulary for those that are too large.
        is_known = (jnp.asarray(tokens) >= 0) & (jnp.asarray(tokens) < self.vocab_size)
        x = constrain(jnp.where(is_known[..., None], x, jnp.nan), BATCH, CONTEXT)
        # The loop of the scan already prevents XLA from merging the repeated computation with the
        # first one.
        policy = get_policy(self.remat) if isinstance(self.remat, str) else None
        block = (
            nn.remat(DecoderBlock, prevent_cse=not self.scan, policy=policy)
            if self.remat
            else DecoderBlock
        )
        if self.scan:
            # `split_rngs` gives each layer its own initial values; without it all start equal.
            layers = nn.scan(
                block,
                variable_axes={"params": 0, "cache": 0, "losses": 0},
                split_rngs={"params": True},
                in_axes=(nn.broadcast, 0) if self.full_blocks else nn.broadcast,
                length=self.depth,
            )
            if self.full_blocks:  # the loop has one body, so each block chooses in it
                is_full = jnp.asarray([i in self.full_blocks for i in range(self.depth)])
                x, _ = layers(settings, name="layers")(x, context, is_full)
            else:
                x, _ = layers(settings.choose(self.window is None), name="layers")(x, context)
        else:
            for i in range(self.depth):
                chosen = settings.choose(self.window is None or i in self.full_blocks)
                x, _ = block(chosen, name=f"layers_{i}")(x, context)
        x = settings.make_norm("norm")(constrain(x, BATCH, CONTEXT))
        head = None if self.tied else nn.Dense(self.vocab_size, use_bias=False, name="head")
        if self.logits_chunk is not None and train and not self.is_initializing():
            if x.shape[1] % self.logits_chunk:
                raise ValueError(
                    "TransformerLM: `logits_chunk` must divide the number of tokens, "
                    f"{x.shape[1]}, got {self.logits_chunk}"
                )
            kernel = embed.embedding.T if head is None else head.variables["params"]["kernel"]
            dtype = jnp.result_type(x, kernel)
            return ChunkedLogits(x, kernel, self.logits_chunk, dtype, self.logits_cap)
        logits = cap_values(embed.attend(x) if head is None else head(x), self.logits_cap)
        # Over the vocabulary too: with a large one the logits are the largest array of the step.
        return constrain(logits, BATCH, CONTEXT, "tensor")

    def make_settings(self) -> BlockSettings:
        """Return the block sizes and variants.

        Raises:
          ValueError: sizes that do not divide each other.
        """
        kv_heads = self.kv_heads or self.heads
        is_rotary = self.positions == "rotary"
        divisor, shown = (2 * self.heads, "2 * heads") if is_rotary else (self.heads, "heads")
        if self.head_size is None and self.width % divisor:
            raise ValueError(
                f"TransformerLM: `width` must be a multiple of {shown} = {divisor}, got "
                f"{self.width}"
            )
        if self.head_size is not None and is_rotary and self.head_size % 2:
            raise ValueError(
                f"TransformerLM: `head_size` must be even to be rotated, got {self.head_size}"
            )
        if self.heads % kv_heads:
            raise ValueError(
                f"TransformerLM: `heads` must be a multiple of kv_heads = {kv_heads}, got "
                f"{self.heads}"
            )
        if self.full_blocks and (self.window is None or max(self.full_blocks) >= self.depth):
            raise ValueError(
                "TransformerLM: `full_blocks` must be numbers below depth = "
                f"{self.depth}, with a `window` for the others, got {tuple(self.full_blocks)} and "
                f"window = {self.window}"
            )
        if self.experts is not None and (self.mlp, self.activation, self.bias) != (
            "gated",
            "silu",
            False,
        ):
            raise ValueError(
                "TransformerLM: `experts` must have mlp='gated', activation='silu' and bias=False"
            )
        if self.experts is not None and self.experts_per_token > self.experts:
            found = f"{self.experts_per_token} of {self.experts}"
            raise ValueError(
                f"TransformerLM: `experts_per_token` must be at most `experts`, got {found}"
            )
        names = {field.name for field in dataclasses.fields(BlockSettings)} - {
            "attention_bias",
            "out_bias",
            "mlp_bias",
        }
        settings = {name: getattr(self, name) for name in names}
        settings["attention_bias"] = self.bias in (True, "attention", "qkv")
        settings["out_bias"] = self.bias in (True, "attention")
        settings["mlp_bias"] = self.bias in (True, "mlp")
        settings["kv_heads"] = kv_heads
        settings["head_size"] = self.head_size or self.width // self.heads
        settings["full_blocks"] = tuple(self.full_blocks)
        settings["attention_scale"] = self.attention_scale or settings["head_size"] ** -0.5
        settings["rotary_base"] = self.rotary_base if is_rotary else None
        settings["rotary_scaling"] = make_scaling(self.rotary_scaling)
        return BlockSettings(**settings)

    def _embed_positions(self, length: int, positions: jax.Array | None) -> jax.Array:
        if self.max_length is None:
            raise ValueError(
                "TransformerLM: `max_length` must be set with positions='learned', got None"
            )
        if length > self.max_length:
            raise ValueError(
                f"TransformerLM: tokens must be at most max_length = {self.max_length}, got "
                f"{length}"
            )
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(self.max_length, self.width, embedding_init=init, name="positions")
        table = constrain(jnp.asarray(embed.embedding))
        return table[:length] if positions is None else table[positions]


def _look_up(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return f[B, T, D], the entries in `table` f[V, D] for `tokens` int[B, T].

    On a mesh each device looks up some columns for the tokens on all devices, and then the parts
    are exchanged: as many bytes as its own tokens have, where gathering the table would take as
    many as the table, on any number of devices.
    """
    table = jnp.asarray(table)  # an export has NumPy arrays, which traced tokens cannot index
    x = constrain(table, None, _WIDTH)[constrain(tokens, "data")]
    # One axis of the mesh after the other: XLA would gather all tokens to exchange two at once.
    x = constrain(constrain(x, "data", None, _WIDTH), "data", None, _WIDTH[:-1])
    return constrain(constrain(x, BATCH, None, CONTEXT), BATCH, CONTEXT)


def get_policy(name: RematPolicy) -> Callable[..., Any]:
    """Return what `jax.checkpoint` keeps: 'offload', or a name in `jax.checkpoint_policies`.

    'offload' keeps arrays with the name BLOCK_INPUT (`jax.ad_checkpoint.checkpoint_name`) in the
    memory of the host.

    Raises:
      ValueError: 'offload' with devices that do not have such memory.
    """
    if name != "offload":
        policy: Callable[..., Any] = getattr(jax.checkpoint_policies, name)
        return policy
    jax.devices()[0].memory(HOST_MEMORY)  # before tracing: the compiler's error is about less
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[BLOCK_INPUT],
        offload_src="device",
        offload_dst=HOST_MEMORY,
    )
