"""Roles of parameters of tiny models, named and built as different authors would."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

from jengine.extras.networks.lora import LoRA
from jengine.extras.networks.networks import SmallCNN, SmallViT
from jengine.extras.networks.transformer import TransformerLM
from jengine.model import CrossEntropy
from jengine.model.functional import FunctionalModel
from jengine.model.linen import LinenModel
from jengine.model.nnx import NnxModel
from jengine.model.roles import parameter_roles

IMAGES = jnp.zeros((2, 8, 8, 3))
TOKENS = jnp.zeros((2, 6), jnp.int32)


def total(outputs, batch):
    return sum(jnp.mean(jnp.square(output)) for output in jax.tree.leaves(outputs))


def roles_of(module, *inputs, loss=total):
    batch = {f'in{i}': x for i, x in enumerate(inputs)}
    kind = LinenModel if isinstance(module, nn.Module) else NnxModel
    model = kind(module, loss=loss, inputs=tuple(batch))
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    return parameter_roles(model, params, batch=batch)


def describe(role):
    def axes(values):
        return ','.join(map(str, values))

    text = f'{role.kind} {axes(role.fan_in)}>{axes(role.fan_out)}'
    text += f' stacked={axes(role.stacked)}' if role.stacked else ''
    text += f' heads={role.heads}' if role.heads is not None else ''
    return text + (f' parts={role.parts}' if role.parts > 1 else '')


def check(roles, table):
    """Compare with lines `path role fan_in>fan_out ...`; `*` in a path is any number."""
    expected = dict(line.strip().split(' ', 1) for line in table.strip().splitlines() if line.strip())
    expected = {path: ' '.join(text.split()) for path, text in expected.items()}
    found = {}
    for path, role in roles.items():
        key = path if path in expected else '.'.join(
            '*' if part.isdigit() else part.rstrip('0123456789') + '*' if part[-1].isdigit() else part
            for part in path.split('.'))
        text = describe(role)
        if expected.get(key, '').find('>') < 0:
            text = role.kind
        found.setdefault(key, set()).add(text)
    assert {key: ' | '.join(sorted(texts)) for key, texts in found.items()} == expected


# -------------------- vision

class Mlp(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        y = nn.gelu(nn.Dense(4 * self.width, name='fc1')(x))
        return nn.Dense(self.width, name='fc2')(y)


class TimmBlock(nn.Module):
    """Fused `qkv`, LayerScale."""

    @nn.compact
    def __call__(self, x):
        b, n, d = x.shape
        y = nn.LayerNorm(name='norm1')(x)
        qkv = nn.Dense(3 * d, name='attn_qkv')(y).reshape(b, n, 3, 2, d // 2)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        scores = nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', q, k) * 0.5)
        y = jnp.einsum('bhqk,bkhd->bqhd', scores, v).reshape(b, n, d)
        x = x + self.param('ls1', nn.initializers.constant(1e-5), (d,)) * nn.Dense(d, name='attn_proj')(y)
        return x + Mlp(d, name='mlp')(nn.LayerNorm(name='norm2')(x))


class TimmViT(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (4, 4), (4, 4), name='patch_embed')(x)
        x = x.reshape(x.shape[0], -1, 8)
        cls = self.param('cls_token', nn.initializers.zeros, (1, 1, 8))
        x = jnp.concatenate([jnp.broadcast_to(cls, (x.shape[0], 1, 8)), x], 1)
        x = x + self.param('pos_embed', nn.initializers.normal(), (1, x.shape[1], 8))
        for i in range(2):
            x = TimmBlock(name=f'blocks_{i}')(x)
        return nn.Dense(5, name='head')(nn.LayerNorm(name='norm')(x)[:, 0])


def test_a_vision_transformer_with_fused_projections():
    check(roles_of(TimmViT(), IMAGES), '''
        patch_embed.kernel input 0,1,2>3
        patch_embed.bias bias >0
        cls_token position
        pos_embed position
        blocks_*.norm1.scale norm
        blocks_*.norm1.bias norm
        blocks_*.norm2.scale norm
        blocks_*.norm2.bias norm
        blocks_*.attn_qkv.kernel hidden 0>1 parts=3
        blocks_*.attn_qkv.bias bias
        blocks_*.attn_proj.kernel hidden 0>1
        blocks_*.attn_proj.bias bias
        blocks_*.ls1 scale >0
        blocks_*.mlp.fc1.kernel hidden 0>1
        blocks_*.mlp.fc1.bias bias
        blocks_*.mlp.fc2.kernel hidden 0>1
        blocks_*.mlp.fc2.bias bias
        norm.scale norm
        norm.bias norm
        head.kernel head 0>1
        head.bias bias
    '''.replace('norm1', 'norm*').replace('norm2', 'norm*').replace('fc1', 'fc*').replace('fc2', 'fc*')
        .replace('ls1', 'ls*'))


class Bottleneck(nn.Module):
    filters: int
    stride: int
    train: bool

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train)
        y = nn.relu(norm()(nn.Conv(self.filters, (1, 1), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(self.filters, (3, 3), (self.stride,) * 2, use_bias=False)(y)))
        y = norm(scale_init=nn.initializers.zeros)(nn.Conv(4 * self.filters, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(4 * self.filters, (1, 1), (self.stride,) * 2, use_bias=False, name='conv_proj')(x)
            x = norm(name='norm_proj')(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(4, (7, 7), (2, 2), use_bias=False, name='conv_init')(x)
        x = nn.max_pool(nn.relu(nn.BatchNorm(use_running_average=not train, name='bn_init')(x)), (3, 3), (2, 2))
        x = Bottleneck(2, 1, train)(x)
        x = Bottleneck(2, 1, train)(x)
        return nn.Dense(5)(x.mean((1, 2)))


def test_a_residual_network():
    check(roles_of(ResNet(), IMAGES), '''
        conv_init.kernel input 0,1,2>3
        bn_init.scale norm
        bn_init.bias norm
        Bottleneck_*.Conv_*.kernel convolution 0,1,2>3
        Bottleneck_*.BatchNorm_*.scale norm
        Bottleneck_*.BatchNorm_*.bias norm
        Bottleneck_0.conv_proj.kernel convolution 0,1,2>3
        Bottleneck_0.norm_proj.scale norm
        Bottleneck_0.norm_proj.bias norm
        Dense_0.kernel head 0>1
        Dense_0.bias bias
    '''.replace('_0.conv', '_*.conv').replace('_0.norm', '_*.norm').replace('Dense_0', 'Dense_*'))


class ConvNeXtBlock(nnx.Module):
    def __init__(self, d, rngs):
        self.dwconv = nnx.Conv(d, d, (3, 3), feature_group_count=d, rngs=rngs)
        self.norm = nnx.LayerNorm(d, rngs=rngs)
        self.pwconv1 = nnx.Linear(d, 4 * d, rngs=rngs)
        self.pwconv2 = nnx.Linear(4 * d, d, rngs=rngs)
        self.gamma = nnx.Param(jnp.full((d,), 1e-6))

    def __call__(self, x):
        y = self.pwconv2(jax.nn.gelu(self.pwconv1(self.norm(self.dwconv(x)))))
        return x + self.gamma * y


class ConvNeXt(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(3, 4, (2, 2), (2, 2), rngs=rngs)
        self.stem_norm = nnx.LayerNorm(4, rngs=rngs)
        self.blocks = nnx.List([ConvNeXtBlock(4, rngs) for _ in range(2)])
        self.downsample = nnx.Conv(4, 8, (2, 2), (2, 2), rngs=rngs)
        self.last = ConvNeXtBlock(8, rngs)
        self.fc = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        x = self.stem_norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.fc(self.last(self.downsample(x)).mean((1, 2)))


def test_a_modern_convolutional_network():
    block = '''
        X.dwconv.kernel depthwise 0,1,2>3
        X.dwconv.bias bias
        X.norm.scale norm
        X.norm.bias norm
        X.pwconv*.kernel hidden 0>1
        X.pwconv*.bias bias
        X.gamma scale >0
    '''
    check(roles_of(ConvNeXt, IMAGES), '''
        stem.kernel input 0,1,2>3
        stem.bias bias
        stem_norm.scale norm
        stem_norm.bias norm
        downsample.kernel convolution 0,1,2>3
        downsample.bias bias
        fc.kernel head 0>1
        fc.bias bias
    ''' + block.replace('X', 'blocks.*') + block.replace('X', 'last'))


class UNet(nn.Module):
    @nn.compact
    def __call__(self, image):
        skips, x = [], image
        for i, width in enumerate((4, 8)):
            x = nn.relu(nn.GroupNorm(2, name=f'enc{i}_gn')(nn.Conv(width, (3, 3), name=f'enc{i}_conv')(x)))
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(8, (3, 3), name='mid')(x))
        for i, width in enumerate((8, 4)):
            x = nn.ConvTranspose(width, (2, 2), (2, 2), name=f'up{i}')(x)
            x = nn.relu(nn.Conv(width, (3, 3), name=f'dec{i}')(jnp.concatenate([x, skips.pop()], -1)))
        return image + nn.Conv(3, (1, 1), name='to_image')(x)


def test_an_image_to_image_network():
    check(roles_of(UNet(), IMAGES), '''
        enc0_conv.kernel input 0,1,2>3
        enc1_conv.kernel convolution 0,1,2>3
        enc0_conv.bias bias
        enc1_conv.bias bias
        enc0_gn.scale norm
        enc0_gn.bias norm
        enc1_gn.scale norm
        enc1_gn.bias norm
        mid.kernel convolution 0,1,2>3
        mid.bias bias
        up*.kernel convolution 0,1,2>3
        up*.bias bias
        dec*.kernel convolution 0,1,2>3
        dec*.bias bias
        to_image.kernel head 0,1,2>3
        to_image.bias bias
    ''')


class MixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x).swapaxes(1, 2)
        y = nn.Dense(x.shape[1], name='token_out')(nn.gelu(nn.Dense(6, name='token_in')(y)))
        x = x + y.swapaxes(1, 2)
        y = nn.gelu(nn.Dense(12, name='channel_in')(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[2], name='channel_out')(y)


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x):
        b, h, w, c = x.shape
        x = x.reshape(b, 2, h // 2, 2, w // 2, c).transpose(0, 1, 3, 2, 4, 5).reshape(b, 4, -1)
        x = nn.Dense(8, name='stem')(x)
        for _ in range(2):
            x = MixerBlock()(x)
        return nn.Dense(5, name='classes')(nn.LayerNorm(name='last_ln')(x).mean(1))


def test_a_mixer():
    check(roles_of(Mixer(), IMAGES), '''
        stem.kernel input 0>1
        stem.bias bias
        MixerBlock_*.LayerNorm_*.scale norm
        MixerBlock_*.LayerNorm_*.bias norm
        MixerBlock_*.token_in.kernel hidden 0>1
        MixerBlock_*.token_in.bias bias
        MixerBlock_*.token_out.kernel hidden 0>1
        MixerBlock_*.token_out.bias bias
        MixerBlock_*.channel_in.kernel hidden 0>1
        MixerBlock_*.channel_in.bias bias
        MixerBlock_*.channel_out.kernel hidden 0>1
        MixerBlock_*.channel_out.bias bias
        last_ln.scale norm
        last_ln.bias norm
        classes.kernel head 0>1
        classes.bias bias
    ''')


# -------------------- language

class GPTBlock(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        d = x.shape[-1]
        y = nn.LayerNorm(name='ln_1')(x)
        q, k, v = jnp.split(nn.Dense(3 * d, name='c_attn')(y), 3, -1)
        q, k, v = (z.reshape(*z.shape[:2], 2, -1) for z in (q, k, v))
        y = nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(x[..., 0]))
        x = x + nn.Dense(d, name='c_proj')(y.reshape(x.shape))
        y = nn.gelu(nn.Dense(4 * d, name='c_fc')(nn.LayerNorm(name='ln_2')(x)))
        return x + nn.Dense(d, name='mlp_c_proj')(y), None


class GPT2(nn.Module):
    is_stacked: bool

    @nn.compact
    def __call__(self, tokens):
        wte = nn.Embed(11, 8, name='wte')
        x = wte(tokens) + nn.Embed(6, 8, name='wpe')(jnp.arange(tokens.shape[1]))
        if self.is_stacked:
            blocks = nn.scan(GPTBlock, variable_axes={'params': 0}, split_rngs={'params': True}, length=2)
            x, _ = blocks(name='h')(x, None)
        else:
            for i in range(2):
                x, _ = GPTBlock(name=f'h_{i}')(x, None)
        return wte.attend(nn.LayerNorm(name='ln_f')(x))


def test_a_language_model_with_a_tied_head_stacked_and_not():
    block = '''
        X.ln_*.scale norm >0
        X.ln_*.bias norm >0
        X.c_attn.kernel hidden 0>1 parts=3
        X.c_attn.bias bias >0
        X.c_proj.kernel hidden 0>1
        X.c_proj.bias bias >0
        X.c_fc.kernel hidden 0>1
        X.c_fc.bias bias >0
        X.mlp_c_proj.kernel hidden 0>1
        X.mlp_c_proj.bias bias >0
    '''
    rest = '''
        wte.embedding embedding 0>1
        wpe.embedding position
        ln_f.scale norm
        ln_f.bias norm
    '''
    check(roles_of(GPT2(False), TOKENS), rest + block.replace('X', 'h_*'))
    stacked = block.replace(' parts', ' stacked=0 parts').replace('0>1\n', '0>1 stacked=0\n')
    stacked = stacked.replace('>0\n', '>0 stacked=0\n').replace('>1', '>2').replace(' 0>', ' 1>')
    check(roles_of(GPT2(True), TOKENS), rest + stacked.replace('X', 'h').replace('>0 ', '>1 '))


class RMSNorm(nn.Module):
    """As in Gemma's code: the scale is one plus the parameter."""

    @nn.compact
    def __call__(self, x):
        scale = self.param('scale', nn.initializers.zeros, (x.shape[-1],))
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6) * (1 + scale)


class Einsum(nn.Module):
    shape: tuple

    @nn.compact
    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.param('w', nn.initializers.normal(), self.shape))


def rotate(x):
    sin = jnp.sin(jnp.arange(x.shape[1])[:, None, None] * jnp.ones(x.shape[-1] // 2))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * sin - b * sin, b * sin + a * sin], -1)


class GemmaBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        d = x.shape[-1]
        y = RMSNorm(name='pre_attention_norm')(x)
        q = rotate(Einsum((4, d, 4), name='q_einsum')('BTD,NDH->BTNH', y))
        k, v = Einsum((2, 2, d, 4), name='kv_einsum')('BSD,CKDH->CBSKH', y)
        k = rotate(k)
        q = q.reshape(*q.shape[:2], 2, 2, 4)
        weights = nn.softmax(jnp.einsum('BTKGH,BSKH->BTKGS', q, k))
        y = jnp.einsum('BTKGS,BSKH->BTKGH', weights, v).reshape(*x.shape[:2], 4, 4)
        x = x + Einsum((4, 4, d), name='attn_vec_einsum')('BTNH,NHD->BTD', y)
        y = RMSNorm(name='pre_ffw_norm')(x)
        gate = self.param('gating_einsum', nn.initializers.normal(), (2, d, 12))
        linear = self.param('linear', nn.initializers.normal(), (12, d))
        return x + (nn.gelu(y @ gate[0]) * (y @ gate[1])) @ linear


class Gemma(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        table = self.param('input_embedding', nn.initializers.normal(), (11, 8))
        x = table[tokens] * jnp.sqrt(8.0)
        for i in range(2):
            x = GemmaBlock(name=f'layer_{i}')(x)
        return RMSNorm(name='final_norm')(x) @ table.T


def test_a_language_model_written_with_einsum_and_own_norms():
    check(roles_of(Gemma(), TOKENS), '''
        input_embedding embedding 0>1
        layer_*.pre_attention_norm.scale norm >0
        layer_*.q_einsum.w hidden 1>0,2 heads=0
        layer_*.kv_einsum.w hidden 2>0,1,3 heads=1 parts=2
        layer_*.attn_vec_einsum.w hidden 0,1>2 heads=0
        layer_*.pre_ffw_norm.scale norm
        layer_*.gating_einsum hidden 1>2 stacked=0
        layer_*.linear hidden 0>1
        final_norm.scale norm
    ''')


class LlamaBlock(nnx.Module):
    def __init__(self, d, rngs):
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs)
        self.input_layernorm = nnx.RMSNorm(d, rngs=rngs)
        self.q_proj, self.k_proj, self.v_proj = linear(d, (4, 2)), linear(d, (2, 2)), linear(d, (2, 2))
        self.o_proj = linear((4, 2), d, axis=(-2, -1))
        self.post_attention_layernorm = nnx.RMSNorm(d, rngs=rngs)
        self.gate_proj, self.up_proj, self.down_proj = linear(d, 16), linear(d, 16), linear(16, d)

    def __call__(self, x):
        y = self.input_layernorm(x)
        y = jax.nn.dot_product_attention(rotate(self.q_proj(y)), rotate(self.k_proj(y)), self.v_proj(y))
        x = x + self.o_proj(y)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(jax.nn.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nnx.Module):
    def __init__(self, is_stacked, rngs):
        self.embed_tokens = nnx.Embed(11, 8, rngs=rngs)
        make = functools.partial(LlamaBlock, 8)
        if is_stacked:
            self.layers = nnx.vmap(make, axis_size=2)(rngs.fork(split=2))
        else:
            self.layers = nnx.List([make(rngs) for _ in range(2)])
        self.is_stacked = is_stacked
        self.norm = nnx.RMSNorm(8, rngs=rngs)
        self.lm_head = nnx.Linear(8, 11, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed_tokens(tokens)
        if self.is_stacked:
            x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for layer in self.layers:
                x = layer(x)
        return self.lm_head(self.norm(x))


def test_a_language_model_with_grouped_heads_stacked_and_not():
    rest = '''
        embed_tokens.embedding embedding 0>1
        norm.scale norm >0
        lm_head.kernel head 0>1
    '''
    check(roles_of(functools.partial(Llama, False), TOKENS), rest + '''
        layers.*.input_layernorm.scale norm >0
        layers.*.post_attention_layernorm.scale norm >0
        layers.*.q_proj.kernel hidden 0>1,2 heads=1
        layers.*.k_proj.kernel hidden 0>1,2 heads=1
        layers.*.v_proj.kernel hidden 0>1,2 heads=1
        layers.*.o_proj.kernel hidden 0,1>2 heads=0
        layers.*.gate_proj.kernel hidden 0>1
        layers.*.up_proj.kernel hidden 0>1
        layers.*.down_proj.kernel hidden 0>1
    ''')
    check(roles_of(functools.partial(Llama, True), TOKENS), rest + '''
        layers.input_layernorm.scale norm >1 stacked=0
        layers.post_attention_layernorm.scale norm >1 stacked=0
        layers.q_proj.kernel hidden 1>2,3 stacked=0 heads=2
        layers.k_proj.kernel hidden 1>2,3 stacked=0 heads=2
        layers.v_proj.kernel hidden 1>2,3 stacked=0 heads=2
        layers.o_proj.kernel hidden 1,2>3 stacked=0 heads=1
        layers.gate_proj.kernel hidden 1>2 stacked=0
        layers.up_proj.kernel hidden 1>2 stacked=0
        layers.down_proj.kernel hidden 1>2 stacked=0
    ''')


class Experts(nn.Module):
    """Dense dispatch, with biases of experts."""

    @nn.compact
    def __call__(self, x):
        d, e, f = x.shape[-1], 4, 6
        probs = nn.softmax(nn.Dense(e, use_bias=False, name='w_gate')(x))
        weights, chosen = jax.lax.top_k(probs, 2)
        combine = jnp.einsum('btk,btke->bte', weights, jax.nn.one_hot(chosen, e))
        wi = self.param('wi', nn.initializers.normal(), (e, d, f))
        bi = self.param('bi', nn.initializers.zeros, (e, f))
        wo = self.param('wo', nn.initializers.normal(), (e, f, d))
        y = nn.relu(jnp.einsum('btd,edf->btef', x, wi) + bi)
        return jnp.einsum('bte,bted->btd', combine, jnp.einsum('btef,efd->bted', y, wo))


class ExpertLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8, name='tok')(tokens)
        for i in range(2):
            x = x + nn.SelfAttention(2, name=f'mha{i}')(nn.RMSNorm(name=f'n{i}a')(x))
            x = x + Experts(name=f'moe{i}')(nn.RMSNorm(name=f'n{i}b')(x))
        return nn.Dense(11, name='unembed')(x)


def test_a_mixture_of_experts():
    check(roles_of(ExpertLM(), TOKENS), '''
        tok.embedding embedding 0>1
        n0a.scale norm
        n0b.scale norm
        n1a.scale norm
        n1b.scale norm
        mha*.query.kernel hidden 0>1,2 heads=1
        mha*.query.bias bias >0,1 heads=0
        mha*.key.kernel hidden 0>1,2 heads=1
        mha*.key.bias bias >0,1 heads=0
        mha*.value.kernel hidden 0>1,2 heads=1
        mha*.value.bias bias >0,1 heads=0
        mha*.out.kernel hidden 0,1>2 heads=0
        mha*.out.bias bias >0
        moe*.w_gate.kernel router 0>1
        moe*.wi hidden 1>2 stacked=0
        moe*.bi bias >1 stacked=0
        moe*.wo hidden 1>2 stacked=0
        unembed.kernel head 0>1
        unembed.bias bias
    ''')


class T5Attention(nn.Module):
    has_bias: bool = False

    @nn.compact
    def __call__(self, x, memory, bias=None):
        def heads(z):
            return z.reshape(*z.shape[:2], 2, -1)

        dense = functools.partial(nn.Dense, x.shape[-1], use_bias=False)
        q, k, v = heads(dense(name='q')(x)), heads(dense(name='k')(memory)), heads(dense(name='v')(memory))
        if self.has_bias:
            buckets = jnp.abs(jnp.arange(x.shape[1])[:, None] - jnp.arange(memory.shape[1]))
            table = nn.Embed(6, 2, name='relative_attention_bias')
            bias = jnp.moveaxis(table(buckets), -1, 0)[None]
        y = nn.dot_product_attention(q, k, v, bias=bias)
        return dense(name='o')(y.reshape(x.shape)), bias


class T5Ff(nn.Module):
    @nn.compact
    def __call__(self, x):
        wi = nn.gelu(nn.Dense(16, use_bias=False, name='wi_0')(x)) * nn.Dense(16, use_bias=False, name='wi_1')(x)
        return nn.Dense(x.shape[-1], use_bias=False, name='wo')(wi)


class T5(nn.Module):
    @nn.compact
    def __call__(self, source, target):
        shared = nn.Embed(11, 8, name='shared')
        x, bias = shared(source), None
        for i in range(2):
            y, bias = T5Attention(i == 0, name=f'enc{i}_self')(z := nn.RMSNorm(name=f'enc{i}_ln0')(x), z, bias)
            x = x + y
            x = x + T5Ff(name=f'enc{i}_ff')(nn.RMSNorm(name=f'enc{i}_ln1')(x))
        memory = nn.RMSNorm(name='enc_final')(x)
        x = shared(target)
        y, _ = T5Attention(name='dec_self')(x, x)
        x = x + y
        y, _ = T5Attention(name='dec_cross')(nn.RMSNorm(name='dec_ln')(x), memory)
        x = x + y
        return nn.Dense(11, use_bias=False, name='lm_head')(nn.RMSNorm(name='dec_final')(x))


def test_an_encoder_and_decoder_with_relative_positions():
    attention = '\n'.join(f'{module}.{name}.kernel hidden 0>1' for name in 'qkvo'
                          for module in ('enc0_self', 'enc1_self', 'dec_self', 'dec_cross'))
    norms = '\n'.join(f'{name}.scale norm' for name in (
        'enc0_ln*', 'enc1_ln*', 'enc_final', 'dec_ln', 'dec_final'))
    check(roles_of(T5(), TOKENS, TOKENS), f'''
        shared.embedding embedding 0>1
        enc0_self.relative_attention_bias.embedding position
        {attention}
        {norms}
        enc0_ff.wi_*.kernel hidden 0>1
        enc0_ff.wo.kernel hidden 0>1
        enc1_ff.wi_*.kernel hidden 0>1
        enc1_ff.wo.kernel hidden 0>1
        lm_head.kernel head 0>1
    ''')


# -------------------- several inputs, conditions

class Tower(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.MultiHeadDotProductAttention(2, name='attn')(nn.LayerNorm(name='ln')(x))
        return x + y


class CLIP(nn.Module):
    @nn.compact
    def __call__(self, image, text):
        v = nn.Conv(8, (4, 4), (4, 4), use_bias=False, name='conv1')(image)
        v = v.reshape(v.shape[0], -1, 8)
        embedding = self.param('class_embedding', nn.initializers.normal(), (8,))
        v = jnp.concatenate([jnp.broadcast_to(embedding, (v.shape[0], 1, 8)), v], 1)
        v = v + self.param('visual_positions', nn.initializers.normal(), (5, 8))
        v = nn.LayerNorm(name='ln_pre')(v)
        v = nn.LayerNorm(name='ln_post')(Tower(name='visual')(v)[:, 0])
        v = v @ self.param('visual_projection', nn.initializers.normal(), (8, 4))
        t = nn.Embed(11, 8, name='token_embedding')(text)
        t = t + self.param('positional_embedding', nn.initializers.normal(), (6, 8))
        t = nn.LayerNorm(name='ln_final')(Tower(name='text')(t))[jnp.arange(2), text.argmax(-1)]
        t = t @ self.param('text_projection', nn.initializers.normal(), (8, 4))
        scale = jnp.exp(self.param('logit_scale', nn.initializers.constant(2.6), ()))
        v, t = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (v, t))
        return scale * v @ t.T


def test_two_towers():
    tower = '\n'.join(
        [f'X.attn.{name}.kernel hidden 0>1,2 heads=1' for name in ('query', 'key', 'value')]
        + [f'X.attn.{name}.bias bias' for name in ('query', 'key', 'value', 'out')]
        + ['X.attn.out.kernel hidden 0,1>2 heads=0', 'X.ln.scale norm', 'X.ln.bias norm'])
    check(roles_of(CLIP(), IMAGES, TOKENS), '''
        conv1.kernel input 0,1,2>3
        class_embedding position
        visual_positions position
        ln_pre.scale norm
        ln_pre.bias norm
        ln_post.scale norm
        ln_post.bias norm
        visual_projection head 0>1
        token_embedding.embedding embedding 0>1
        positional_embedding position
        ln_final.scale norm
        ln_final.bias norm
        text_projection head 0>1
        logit_scale scale
    '''.replace('conv1', 'conv*') + tower.replace('X', 'visual') + '\n' + tower.replace('X', 'text'))


class DiTBlock(nn.Module):
    @nn.compact
    def __call__(self, x, c):
        d = x.shape[-1]
        modulation = nn.Dense(6 * d, kernel_init=nn.initializers.zeros, name='adaLN_modulation')(nn.silu(c))
        a1, b1, g1, a2, b2, g2 = jnp.split(modulation[:, None], 6, -1)
        norm = functools.partial(nn.LayerNorm, use_bias=False, use_scale=False)
        x = x + g1 * nn.SelfAttention(2, use_bias=False, name='attn')(norm()(x) * (1 + a1) + b1)
        return x + g2 * Mlp(d, name='mlp')(norm()(x) * (1 + a2) + b2)


class DiT(nn.Module):
    @nn.compact
    def __call__(self, x, t, y):
        angles = t[:, None] * jnp.exp(-jnp.arange(4.0))
        c = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        c = nn.Dense(8, name='t_mlp_out')(nn.silu(nn.Dense(8, name='t_mlp_in')(c)))
        c = c + nn.Embed(6, 8, name='y_embedder')(y)
        b, h, w, ch = x.shape
        x = nn.Conv(8, (4, 4), (4, 4), name='x_embedder')(x).reshape(b, -1, 8)
        x = x + self.param('pos', nn.initializers.normal(), (1, 4, 8))
        for i in range(2):
            x = DiTBlock(name=f'block_{i}')(x, c)
        shift, scale = jnp.split(nn.Dense(16, name='final_adaLN')(nn.silu(c))[:, None], 2, -1)
        x = nn.LayerNorm(use_bias=False, use_scale=False)(x) * (1 + scale) + shift
        return nn.Dense(48, name='final_linear')(x).reshape(b, h, w, ch)


def test_a_diffusion_transformer():
    check(roles_of(DiT(), IMAGES, jnp.zeros(2), jnp.zeros(2, jnp.int32)), '''
        t_mlp_in.kernel input 0>1
        t_mlp_in.bias bias
        t_mlp_out.kernel hidden 0>1
        t_mlp_out.bias bias
        y_embedder.embedding embedding 0>1
        x_embedder.kernel input 0,1,2>3
        x_embedder.bias bias
        pos position
        block_*.adaLN_modulation.kernel hidden 0>1 parts=6
        block_*.adaLN_modulation.bias bias
        block_*.attn.query.kernel hidden 0>1,2 heads=1
        block_*.attn.key.kernel hidden 0>1,2 heads=1
        block_*.attn.value.kernel hidden 0>1,2 heads=1
        block_*.attn.out.kernel hidden 0,1>2 heads=0
        block_*.mlp.fc*.kernel hidden 0>1
        block_*.mlp.fc*.bias bias
        final_adaLN.kernel hidden 0>1 parts=2
        final_adaLN.bias bias
        final_linear.kernel head 0>1
        final_linear.bias bias
    ''')


class Perceiver(nn.Module):
    @nn.compact
    def __call__(self, x):
        b = x.shape[0]
        x = x.reshape(b, -1, x.shape[-1])
        grid = jnp.linspace(-1, 1, x.shape[1])[None, :, None] * jnp.ones((b, 1, 2))
        x = jnp.concatenate([x, jnp.sin(grid)], -1)
        latents = self.param('latents', nn.initializers.normal(), (3, 8))
        z = jnp.broadcast_to(latents, (b, 3, 8))
        dense = functools.partial(nn.Dense, 8, use_bias=False)
        q = dense(name='cross_to_q')(nn.LayerNorm(name='cross_norm')(z))
        k, v = jnp.split(nn.Dense(16, use_bias=False, name='cross_to_kv')(x), 2, -1)
        z = z + dense(name='cross_out')(nn.softmax(q @ k.swapaxes(1, 2)) @ v)
        z = z + Mlp(8, name='ff')(nn.LayerNorm(name='ff_norm')(z))
        return dense(name='to_logits')(z.mean(1))


def test_learned_latents():
    check(roles_of(Perceiver(), IMAGES), '''
        latents position
        cross_norm.scale norm
        cross_norm.bias norm
        cross_to_q.kernel hidden 0>1
        cross_to_kv.kernel input 0>1 parts=2
        cross_out.kernel hidden 0>1
        ff_norm.scale norm
        ff_norm.bias norm
        ff.fc*.kernel hidden 0>1
        ff.fc*.bias bias
        to_logits.kernel head 0>1
    ''')


# -------------------- graphs, sequences, others

class GraphNetwork(nn.Module):
    """Message passing over edges, with segment sums."""

    @nn.compact
    def __call__(self, nodes, senders, receivers, kinds):
        h = nn.Dense(8, name='encode_nodes')(nodes)
        edge = nn.Embed(4, 8, name='encode_edges')(kinds)
        for i in range(2):
            message = nn.relu(nn.Dense(8, name=f'message{i}')(
                jnp.concatenate([h[senders], h[receivers], edge], -1)))
            pooled = jax.ops.segment_sum(message, receivers, num_segments=h.shape[0])
            eps = self.param(f'eps{i}', nn.initializers.zeros, ())
            h = nn.LayerNorm(name=f'layernorm{i}')(h + nn.Dense(8, name=f'update{i}')((1 + eps) * h + pooled))
        return nn.Dense(3, name='readout')(nn.relu(h.mean(0)))


def test_a_graph_network():
    edges = jnp.zeros(5, jnp.int32)
    check(roles_of(GraphNetwork(), jnp.zeros((4, 6)), edges, edges, edges), '''
        encode_nodes.kernel input 0>1
        encode_nodes.bias bias
        encode_edges.embedding embedding 0>1
        message*.kernel hidden 0>1
        message*.bias bias
        eps* scale
        layernorm*.scale norm
        layernorm*.bias norm
        update*.kernel hidden 0>1
        update*.bias bias
        readout.kernel head 0>1
        readout.bias bias
    ''')


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, series):
        x = nn.RNN(nn.OptimizedLSTMCell(8))(series)
        x = nn.RNN(nn.GRUCell(8))(x)
        return nn.Dense(2, name='forecast')(x[:, -1])


def test_recurrent_layers():
    gates = [f'OptimizedLSTMCell_*.i{gate}.kernel input 0>1' for gate in 'ifgo']
    gates += [f'OptimizedLSTMCell_*.h{gate}.{name}' for gate in 'ifgo' for name in ('kernel hidden 0>1', 'bias bias')]
    gates += [f'GRUCell_*.i{gate}.{name}' for gate in 'rzn' for name in ('kernel hidden 0>1', 'bias bias')]
    gates += [f'GRUCell_*.h{gate}.kernel hidden 0>1' for gate in 'rzn']
    check(roles_of(Recurrent(), jnp.zeros((2, 5, 3))), '\n'.join(gates) + '''
        GRUCell_*.hn.bias bias
        forecast.kernel head 0>1
        forecast.bias bias
    ''')


class VQVAE(nn.Module):
    @nn.compact
    def __call__(self, x):
        z = nn.Conv(4, (4, 4), (2, 2), name='down')(x)
        z = nn.Conv(4, (1, 1), name='pre_quant')(nn.relu(z))
        codebook = self.param('codebook', nn.initializers.uniform(), (7, 4))
        distance = (z ** 2).sum(-1, keepdims=True) - 2 * z @ codebook.T + (codebook ** 2).sum(-1)
        quantized = codebook[jnp.argmin(distance, -1)]
        commit = jnp.mean((jax.lax.stop_gradient(quantized) - z) ** 2)
        y = z + jax.lax.stop_gradient(quantized - z)
        y = nn.relu(nn.Conv(4, (3, 3), name='post_quant')(y))
        return nn.ConvTranspose(3, (4, 4), (2, 2), name='to_rgb')(y), commit


def test_a_codebook():
    check(roles_of(VQVAE(), IMAGES), '''
        down.kernel input 0,1,2>3
        down.bias bias
        pre_quant.kernel convolution 0,1,2>3
        pre_quant.bias bias
        codebook embedding 0>1
        post_quant.kernel convolution 0,1,2>3
        post_quant.bias bias
        to_rgb.kernel head 0,1,2>3
        to_rgb.bias bias
    ''')


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, observation, action):
        x = nn.tanh(nn.Dense(8, name='torso')(observation))
        a = nn.tanh(nn.Dense(8)(x))
        mean = nn.Dense(2, name='pi')(a)
        log_std = self.param('log_std', nn.initializers.zeros, (2,))
        log_prob = -((action - mean) / jnp.exp(log_std)) ** 2 / 2 - log_std
        return log_prob.sum(-1), nn.Dense(1, name='v')(nn.tanh(nn.Dense(8)(x)))


def test_an_actor_and_a_critic():
    check(roles_of(ActorCritic(), jnp.zeros((2, 5)), jnp.zeros((2, 2))), '''
        torso.kernel input 0>1
        torso.bias bias
        Dense_*.kernel hidden 0>1
        Dense_*.bias bias
        pi.kernel head 0>1
        pi.bias bias
        log_std scale
        v.kernel head 0>1
        v.bias bias
    ''')


class LowRank(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.up = nnx.LoRALinear(8, 12, lora_rank=2, rngs=rngs)
        self.down = nnx.Linear(12, 8, rngs=rngs)
        self.out = nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, tokens):
        return self.out(self.down(jax.nn.relu(self.up(self.embed(tokens)))))


def test_low_rank_adapters():
    check(roles_of(LowRank, TOKENS), '''
        embed.embedding embedding 0>1
        up.kernel hidden 0>1
        up.bias bias
        up.lora.lora_a adapter 0>1
        up.lora.lora_b adapter 0>1
        down.kernel hidden 0>1
        down.bias bias
        out.kernel head 0>1
        out.bias bias
    ''')


def test_adapters_added_to_fixed_weights():
    inner = LinenModel(nn.Sequential([nn.Dense(6), nn.relu, nn.Dense(3)]), loss=total, inputs='x')
    model, batch = LoRA(inner, targets=['layers_0'], rank=2, trainable=['layers_2']), {'x': jnp.zeros((2, 4))}
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    check(parameter_roles(model, params, batch=batch), '''
        layers_0.kernel.lora_a adapter 0>1
        layers_0.kernel.lora_b adapter 0>1
        layers_2.kernel head 0>1
        layers_2.bias bias
    '''.replace('layers_0', 'layers_*').replace('layers_2', 'layers_*'))


class Autoencoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.relu(nn.Dense(8, name='encoder')(x))
        mean, log_var = nn.Dense(2, name='mean')(h), nn.Dense(2, name='log_var')(h)
        noise = jax.random.normal(self.make_rng('dropout'), mean.shape) if self.has_rng('dropout') else 0.0
        z = mean + noise * jnp.exp(log_var / 2)
        h = nn.relu(nn.Dense(8, name='decoder')(z))
        return nn.sigmoid(nn.Dense(x.shape[-1], name='pixels')(h)), mean, log_var


def test_a_variational_autoencoder():
    check(roles_of(Autoencoder(), jnp.zeros((2, 12))), '''
        encoder.kernel input 0>1
        encoder.bias bias
        mean.kernel hidden 0>1
        mean.bias bias
        log_var.kernel hidden 0>1
        log_var.bias bias
        decoder.kernel hidden 0>1
        decoder.bias bias
        pixels.kernel head 0>1
        pixels.bias bias
    ''')


class NeRF(nn.Module):
    @nn.compact
    def __call__(self, points, directions):
        def encode(x):
            return jnp.concatenate([jnp.sin(x), jnp.cos(x)], -1)

        x = points = encode(points)
        for i in range(3):
            x = nn.relu(nn.Dense(8, name=f'trunk{i}')(x))
            x = jnp.concatenate([x, points], -1) if i == 1 else x
        sigma = nn.relu(nn.Dense(1, name='sigma')(x))
        x = jnp.concatenate([nn.Dense(8, name='bottleneck')(x), encode(directions)], -1)
        rgb = nn.sigmoid(nn.Dense(3, name='rgb')(nn.relu(nn.Dense(4, name='view')(x))))
        weight = 1 - jnp.exp(-sigma)
        return (weight * rgb).sum(1)


def test_a_radiance_field():
    points = jnp.zeros((2, 4, 3))
    kinds = dict(trunk0='input', trunk1='hidden', trunk2='hidden', sigma='head', bottleneck='hidden',
                 view='hidden', rgb='head')
    check(roles_of(NeRF(), points, points), '\n'.join(
        f'{name}.kernel {kind} 0>1\n{name}.bias bias' for name, kind in kinds.items()))


class Modulated(nn.Module):
    """A convolution whose kernel is scaled for each example, as in StyleGAN."""

    @nn.compact
    def __call__(self, z):
        w = nn.relu(nn.Dense(8, name='mapping')(z))
        x = jnp.broadcast_to(self.param('const', nn.initializers.normal(), (1, 4, 4, 6)), (2, 4, 4, 6))
        kernel = self.param('weight', nn.initializers.normal(), (3, 3, 6, 5))
        kernel = kernel * nn.Dense(6, name='affine')(w)[:, None, None, :, None]
        kernel = kernel * jax.lax.rsqrt((kernel ** 2).sum((1, 2, 3), keepdims=True) + 1e-8)
        axes = ('NHWC', 'HWIO', 'NHWC')
        convolve = functools.partial(
            jax.lax.conv_general_dilated, window_strides=(1, 1), padding='SAME', dimension_numbers=axes)
        x = jax.vmap(lambda x, k: convolve(x[None], k)[0])(x, kernel) + self.param('noise', nn.initializers.zeros, ()) * jnp.ones((2, 4, 4, 5))
        return nn.Conv(3, (1, 1), name='to_rgb')(nn.relu(x))


def test_kernels_that_the_data_scale():
    check(roles_of(Modulated(), jnp.zeros((2, 5))), '''
        mapping.kernel input 0>1
        mapping.bias bias
        affine.kernel hidden 0>1
        affine.bias bias
        const position
        weight convolution 0,1,2>3
        noise scale
        to_rgb.kernel head 0,1,2>3
        to_rgb.bias bias
    ''')


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.WeightNorm(nn.Dense(8, name='first'), name='wn')(x))
        x = nn.relu(nn.SpectralNorm(nn.Dense(7, name='middle'))(x, update_stats=train))
        return nn.Dense(3, name='last')(x)


def test_kernels_with_a_norm():
    check(roles_of(Normalized(), jnp.zeros((2, 6))), '''
        first.kernel input 0>1
        first.bias bias
        wn.first/kernel/scale scale >0
        middle.kernel hidden 0>1
        middle.bias bias
        last.kernel head 0>1
        last.bias bias
    ''')


class Member(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Conv(4, (3, 3), name='full')(x))
        x = nn.BatchNorm(use_running_average=not train, name='bn')(
            nn.Conv(4, (3, 3), feature_group_count=4, name='each')(x))
        return nn.Dense(2, name='out')(x.mean((1, 2)))


class Ensemble(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        collections = {'params': 0, 'batch_stats': 0}
        members = nn.vmap(
            Member, in_axes=(None, None), variable_axes=collections, split_rngs={'params': True}, axis_size=3)
        return members(name='members')(x, train)


def test_an_ensemble_on_gray_images():
    check(roles_of(Ensemble(), IMAGES[..., :1]), '''
        members.full.kernel input 1,2,3>4 stacked=0
        members.full.bias bias >1 stacked=0
        members.each.kernel depthwise 1,2,3>4 stacked=0
        members.each.bias bias >1 stacked=0
        members.bn.scale norm >1 stacked=0
        members.bn.bias norm >1 stacked=0
        members.out.kernel head 1>2 stacked=0
        members.out.bias bias >1 stacked=0
    ''')


# -------------------- other ways to a loss

def plain_init(rng):
    layers = dict(w=jnp.zeros((3, 8, 8)), b=jnp.zeros((3, 8)), g=jnp.ones((3, 8)))
    return dict(table=jnp.zeros((11, 8)), layers=layers, out=jnp.zeros((8, 11)))


def plain_block(x, layer):
    y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * layer['g']
    return x + jnp.tanh(y @ layer['w'] + layer['b']), None


def run_scan(params, batch):
    return jax.lax.scan(plain_block, params['table'][batch], params['layers'])[0]


def run_loop(params, batch):
    def layer(i):
        return jax.tree.map(lambda leaf: leaf[i], params['layers'])

    return jax.lax.fori_loop(0, 3, lambda i, x: plain_block(x, layer(i))[0], params['table'][batch])


def run_unrolled(params, batch):
    x = jax.nn.one_hot(batch, 11) @ params['table']
    for i in range(3):
        x, _ = jax.checkpoint(plain_block)(x, {name: leaf[i] for name, leaf in params['layers'].items()})
    return x


PLAIN = '''
    table embedding 0>1
    layers.w hidden 1>2 stacked=0
    layers.b bias >1 stacked=0
    layers.g norm >1 stacked=0
    out head 0>1
'''


@pytest.mark.parametrize('run', [run_scan, run_loop, run_unrolled])
def test_plain_functions_over_stacked_layers(run):
    model = FunctionalModel(plain_init, lambda params, batch: run(params, batch) @ params['out'])
    check(parameter_roles(model, plain_init(None), batch=TOKENS), PLAIN)


def test_a_loss_with_gradients_in_it():
    def energy(params, x):
        return (jnp.tanh(x @ params['in'] + params['b']) @ params['hidden'] @ params['last']).sum()

    def loss(params, batch):
        force = jax.grad(energy, argnums=1)(params, batch)
        return energy(params, batch) + (force ** 2).sum()

    params = dict(b=jnp.zeros(8), hidden=jnp.zeros((8, 8)), last=jnp.zeros((8, 1)))
    params['in'] = jnp.zeros((3, 8))
    model = FunctionalModel(lambda rng: params, loss)
    check(parameter_roles(model, params, batch=jnp.zeros((2, 3))), '''
        in input 0>1
        b bias
        hidden hidden 0>1
        last head 0>1
    ''')


def test_a_training_step_of_ones_own():
    def train_step(state, batch, ctx):
        def update(state, i):
            step = ctx.fold_in(i)
            noise = jax.random.normal(step.rng, (8,))
            return step.update(state, lambda params: (run_scan(params, batch) + noise) @ params['out'])

        state, metrics = jax.lax.scan(update, state, jnp.arange(2))
        return state, {'loss': metrics['loss'].mean()}

    model = FunctionalModel(plain_init, train_step=train_step)
    check(parameter_roles(model, plain_init(None), batch=TOKENS), PLAIN)


def test_several_optimizers():
    def critic(params, x):
        return jnp.tanh(x @ params['critic']['first']) @ params['critic']['last']

    def generate(params, batch):
        return jnp.tanh(batch['noise'] @ params['generator']['first']) @ params['generator']['last']

    losses = dict(
        critic=lambda params, batch: critic(params, batch['x']) - critic(params, generate(params, batch)),
        generator=lambda params, batch: -critic(params, generate(params, batch)))
    params = dict(critic=dict(first=jnp.zeros((5, 8)), last=jnp.zeros((8, 1))),
                  generator=dict(first=jnp.zeros((2, 8)), last=jnp.zeros((8, 5))))
    model = FunctionalModel(lambda rng: params, losses)
    batch = dict(x=jnp.zeros((2, 5)), noise=jnp.zeros((2, 2)))
    roles = parameter_roles(model, params, batch=batch, phases=tuple(losses))
    assert {path: role.kind for path, role in roles.items()} == {
        'critic.first': 'input', 'critic.last': 'head', 'generator.first': 'input', 'generator.last': 'hidden'}


# -------------------- jengine's own networks

def test_the_transformer_stacked_and_not():
    settings = dict(vocab_size=11, width=8, heads=4, kv_heads=2, mlp_width=12, experts=4)
    stacked, unrolled = (
        roles_of(TransformerLM(**settings, scan=scan), TOKENS) for scan in (True, False))
    check(stacked, '''
        embed.embedding embedding 0>1
        layers.attn_norm.scale norm >1 stacked=0
        layers.attn.query.kernel hidden 1>2,3 stacked=0 heads=2
        layers.attn.key.kernel hidden 1>2,3 stacked=0 heads=2
        layers.attn.value.kernel hidden 1>2,3 stacked=0 heads=2
        layers.attn.out.kernel hidden 1,2>3 stacked=0 heads=1
        layers.mlp_norm.scale norm >1 stacked=0
        layers.experts.router.kernel router 1>2 stacked=0
        layers.experts.gate hidden 2>3 stacked=0,1
        layers.experts.up hidden 2>3 stacked=0,1
        layers.experts.down hidden 2>3 stacked=0,1
        norm.scale norm >0
        head.kernel head 0>1
    ''')
    for path, role in unrolled.items():
        other = stacked[re.sub(r'layers_\d', 'layers', path)]
        assert role.kind == other.kind, path
        if path.startswith('layers'):
            assert [axis + 1 for axis in role.fan_in + role.fan_out] == [*other.fan_in, *other.fan_out], path


def test_the_small_image_classifiers():
    cross_entropy = CrossEntropy(label='label')
    batch = {'image': IMAGES, 'label': jnp.zeros(2, jnp.int32)}
    kinds = []
    for module in (SmallViT(patch=2, width=8, depth=1, heads=2), SmallCNN(widths=(4, 6))):
        model = LinenModel(module, cross_entropy)
        params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
        roles = parameter_roles(model, params, batch=batch)
        kinds.append({path: role.kind for path, role in roles.items() if role.kind not in ('bias', 'norm')})
    assert kinds[0] == {
        'patch_embed.kernel': 'input', 'cls_token': 'position', 'pos_embed': 'position', 'head.kernel': 'head',
        **{f'layers_0.{name}.kernel': 'hidden' for name in (
            'attn.query', 'attn.key', 'attn.value', 'attn.out', 'fc1', 'fc2')}}
    assert kinds[1] == {
        'conv0_0.kernel': 'input', 'conv0_1.kernel': 'convolution', 'conv1_0.kernel': 'convolution',
        'conv1_1.kernel': 'convolution', 'head.kernel': 'head'}


# -------------------- state spaces, linear attention, experts, sound, masks, windows

class SelectiveStateSpace(nn.Module):
    """Fused projections of unequal sizes, a recurrence with a decay of its own for each state."""

    @nn.compact
    def __call__(self, h):
        d, n, rank = 12, 4, 3
        dense = functools.partial(nn.Dense, use_bias=False)
        x, z = jnp.split(dense(2 * d, name='in_proj')(h), 2, -1)
        x = nn.silu(nn.Conv(d, (4,), padding='CAUSAL', feature_group_count=d, name='conv')(x))
        dt, b, c = jnp.split(dense(rank + 2 * n, name='x_proj')(x), [rank, rank + n], -1)
        dt = nn.softplus(dense(d, name='dt_proj')(dt) + self.param('dt_bias', nn.initializers.zeros, (d,)))
        a = -jnp.exp(self.param('A_log', nn.initializers.ones, (d, n)))

        def step(state, inputs):
            x, dt, b, c = inputs
            state = state * jnp.exp(dt[..., None] * a) + (dt * x)[..., None] * b[:, None]
            return state, jnp.einsum('bdn,bn->bd', state, c)

        rows = jax.tree.map(lambda x: x.swapaxes(0, 1), (x, dt, b, c))
        y = jax.lax.scan(step, jnp.zeros((x.shape[0], d, n)), rows)[1].swapaxes(0, 1)
        y = y + self.param('D', nn.initializers.ones, (d,)) * x
        return dense(8, name='out_proj')(y * nn.silu(z))


class Mamba(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(10, 8, name='embedding')(tokens)
        for i in range(2):
            h = h + SelectiveStateSpace(name=f'mixer{i}')(nn.RMSNorm(name=f'norm{i}')(h))
        return nn.Dense(10, use_bias=False, name='lm_head')(nn.RMSNorm(name='norm_f')(h))


def test_selective_state_spaces():
    check(roles_of(Mamba(), TOKENS), '''
        embedding.embedding embedding 0>1
        norm*.scale norm
        mixer*.in_proj.kernel hidden 0>1 parts=2
        mixer*.conv.kernel depthwise 0,1>2
        mixer*.conv.bias bias >0
        mixer*.x_proj.kernel hidden 0>1
        mixer*.dt_proj.kernel hidden 0>1
        mixer*.dt_bias bias >0
        mixer*.A_log scale
        mixer*.D scale >0
        mixer*.out_proj.kernel hidden 0>1
        norm_f.scale norm
        lm_head.kernel head 0>1
    ''')


class TimeMix(nn.Module):
    """Linear attention with learned decays and bonuses for each head, as RWKV."""

    @nn.compact
    def __call__(self, x):
        b, t, d = x.shape
        heads, size = 2, d // 2
        before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
        mixed = {}
        for name in 'rkvwg':
            mu = self.param(f'time_maa_{name}', nn.initializers.ones, (1, 1, d))
            mixed[name] = x + (before - x) * mu
        dense = functools.partial(nn.Dense, d, use_bias=False)
        r, k, v = (
            dense(name=name)(mixed[name[0]]).reshape(b, t, heads, size) for name in ('receptance', 'key', 'value'))
        gate = nn.silu(dense(name='gate')(mixed['g']))
        first = self.param('time_decay_w1', nn.initializers.normal(), (d, 3))
        second = self.param('time_decay_w2', nn.initializers.normal(), (3, d))
        decay = self.param('time_decay', nn.initializers.zeros, (1, 1, d)) + jnp.tanh(mixed['w'] @ first) @ second
        decay = jnp.exp(-jnp.exp(decay)).reshape(b, t, heads, size)
        bonus = self.param('time_faaaa', nn.initializers.zeros, (heads, size))

        def step(state, inputs):
            r, k, v, w = inputs
            kv = jnp.einsum('bhk,bhv->bhkv', k, v)
            out = jnp.einsum('bhk,bhkv->bhv', r, state + bonus[..., None] * kv)
            return state * w[..., None] + kv, out

        rows = jax.tree.map(lambda x: x.swapaxes(0, 1), (r, k, v, decay))
        y = jax.lax.scan(step, jnp.zeros((b, heads, size, size)), rows)[1].swapaxes(0, 1)
        y = nn.GroupNorm(heads, name='ln_x')(y.reshape(b, t, d))
        return dense(name='output')(y * gate)


class Rwkv(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        h = nn.LayerNorm(name='ln0')(nn.Embed(10, 8, name='emb')(tokens))
        for i in range(2):
            h = h + TimeMix(name=f'att{i}')(nn.LayerNorm(name=f'ln_att{i}')(h))
            x = nn.LayerNorm(name=f'ln_ffn{i}')(h)
            k = jnp.square(nn.relu(nn.Dense(16, use_bias=False, name=f'ffn_key{i}')(x)))
            gate = nn.sigmoid(nn.Dense(8, use_bias=False, name=f'ffn_receptance{i}')(x))
            h = h + gate * nn.Dense(8, use_bias=False, name=f'ffn_value{i}')(k)
        return nn.Dense(10, use_bias=False, name='head')(nn.LayerNorm(name='ln_out')(h))


def test_linear_attention_with_learned_decays():
    check(roles_of(Rwkv(), TOKENS), '''
        emb.embedding embedding 0>1
        ln*.scale norm
        ln*.bias norm
        ln_att*.scale norm
        ln_att*.bias norm
        ln_ffn*.scale norm
        ln_ffn*.bias norm
        ln_out.scale norm
        ln_out.bias norm
        att*.time_maa_r scale
        att*.time_maa_k scale
        att*.time_maa_v scale
        att*.time_maa_w scale
        att*.time_maa_g scale
        att*.receptance.kernel hidden 0>1
        att*.key.kernel hidden 0>1
        att*.value.kernel hidden 0>1
        att*.gate.kernel hidden 0>1
        att*.time_decay_w* hidden 0>1
        att*.time_decay bias
        att*.time_faaaa scale
        att*.ln_x.scale norm
        att*.ln_x.bias norm
        att*.output.kernel hidden 0>1
        ffn_key*.kernel hidden 0>1
        ffn_receptance*.kernel hidden 0>1
        ffn_value*.kernel hidden 0>1
        head.kernel head 0>1
    ''')


class SharedExpert(nn.Module):
    """Sigmoid scores, a bias that only chooses, fused gate and up, an expert for all."""

    @nn.compact
    def __call__(self, x):
        d = x.shape[-1]
        experts, width = 4, 6
        normal = nn.initializers.normal()
        scores = nn.sigmoid(x @ self.param('gate_weight', normal, (d, experts)))
        bias = self.param('e_score_correction_bias', nn.initializers.zeros, (experts,))
        _, chosen = jax.lax.top_k(scores + bias, 2)
        weights = jnp.take_along_axis(scores, chosen, -1)
        weights = weights / weights.sum(-1, keepdims=True)
        gates = (nn.one_hot(chosen, experts) * weights[..., None]).sum(-2)
        gate_up = self.param('experts_gate_up_proj', normal, (experts, d, 2 * width))
        down = self.param('experts_down_proj', normal, (experts, width, d))
        gate, up = jnp.split(jnp.einsum('btd,edf->btef', x, gate_up), 2, -1)
        y = jnp.einsum('btef,efd,bte->btd', nn.silu(gate) * up, down, gates)
        gate, up = jnp.split(nn.Dense(2 * width, use_bias=False, name='shared_gate_up')(x), 2, -1)
        return y + nn.Dense(d, use_bias=False, name='shared_down')(nn.silu(gate) * up)


class SharedExpertLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        h = nn.Embed(10, 8, name='embed_tokens')(tokens)
        for i in range(2):
            h = h + SharedExpert(name=f'mlp{i}')(nn.RMSNorm(name=f'input_norm{i}')(h))
        return nn.Dense(10, use_bias=False, name='lm_head')(nn.RMSNorm(name='norm')(h))


def test_a_mixture_with_a_shared_expert():
    check(roles_of(SharedExpertLM(), TOKENS), '''
        embed_tokens.embedding embedding 0>1
        input_norm*.scale norm
        mlp*.gate_weight router 0>1
        mlp*.e_score_correction_bias bias
        mlp*.experts_gate_up_proj hidden 1>2 stacked=0 parts=2
        mlp*.experts_down_proj hidden 1>2 stacked=0
        mlp*.shared_gate_up.kernel hidden 0>1 parts=2
        mlp*.shared_down.kernel hidden 0>1
        norm.scale norm
        lm_head.kernel head 0>1
    ''')


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x, memory):
        b, t, d = x.shape

        def split(name, x, bias=True):
            return nn.Dense(d, use_bias=bias, name=name)(x).reshape(b, -1, 2, d // 2)

        q, k, v = split('q_proj', x), split('k_proj', memory, bias=False), split('v_proj', memory)
        y = jnp.einsum('bhqk,bkhd->bqhd', nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', q, k)), v)
        return nn.Dense(d, name='out_proj')(y.reshape(b, t, d))


class Whisper(nn.Module):
    """Convolutions on spectra, sinusoids in the encoder, learned positions and a tied head in the decoder."""

    @nn.compact
    def __call__(self, mel, tokens):
        x = nn.gelu(nn.Conv(8, (3,), name='conv1')(mel))
        x = nn.gelu(nn.Conv(8, (3,), strides=(2,), name='conv2')(x))
        x = x + jnp.sin(jnp.arange(x.shape[1])[:, None] / 10 ** jnp.linspace(0, 4, 8))
        y = nn.LayerNorm(name='enc_norm1')(x)
        x = x + Attention(name='enc_attn')(y, y)
        x = nn.LayerNorm(name='enc_ln_post')(x + Mlp(8, name='enc_mlp')(nn.LayerNorm(name='enc_norm2')(x)))
        embed = nn.Embed(10, 8, name='embed_tokens')
        h = embed(tokens) + self.param('embed_positions', nn.initializers.normal(), (16, 8))[:tokens.shape[1]]
        y = nn.LayerNorm(name='dec_norm1')(h)
        h = h + Attention(name='dec_attn')(y, y)
        h = h + Attention(name='cross_attn')(nn.LayerNorm(name='dec_norm2')(h), x)
        h = h + Mlp(8, name='dec_mlp')(nn.LayerNorm(name='dec_norm3')(h))
        return embed.attend(nn.LayerNorm(name='dec_ln')(h))


def test_an_encoder_of_sound_and_a_decoder():
    attention = '''
        NAME_attn.q_proj.kernel hidden 0>1
        NAME_attn.q_proj.bias bias
        NAME_attn.k_proj.kernel hidden 0>1
        NAME_attn.v_proj.kernel hidden 0>1
        NAME_attn.v_proj.bias bias
        NAME_attn.out_proj.kernel hidden 0>1
        NAME_attn.out_proj.bias bias
    '''
    sides = ''.join(attention.replace('NAME', name) for name in ('enc', 'dec', 'cross'))
    check(roles_of(Whisper(), jnp.zeros((2, 12, 5)), TOKENS), sides + '''
        conv1.kernel input 0,1>2
        conv1.bias bias
        conv2.kernel convolution 0,1>2
        conv2.bias bias
        enc_norm*.scale norm
        enc_norm*.bias norm
        enc_ln_post.scale norm
        enc_ln_post.bias norm
        enc_mlp.fc*.kernel hidden 0>1
        enc_mlp.fc*.bias bias
        embed_tokens.embedding embedding
        embed_positions position
        dec_norm*.scale norm
        dec_norm*.bias norm
        dec_mlp.fc*.kernel hidden 0>1
        dec_mlp.fc*.bias bias
        dec_ln.scale norm
        dec_ln.bias norm
    ''')


class MaskedAutoencoder(nn.Module):
    """A random part of the patches is encoded, mask tokens stand for the others; GRN in the decoder."""

    @nn.compact
    def __call__(self, x, noise):
        b, d = x.shape[0], 8
        patches = x.reshape(b, 2, 4, 2, 4, 3).swapaxes(2, 3).reshape(b, 4, 48)
        h = nn.Dense(d, name='patch_embed')(patches) + self.param('pos_embed', nn.initializers.normal(), (1, 4, d))
        order = jnp.argsort(noise, axis=1)
        kept = jnp.take_along_axis(h, order[:, :2, None], 1)
        kept = nn.LayerNorm(name='norm')(kept + Mlp(d, name='block')(nn.LayerNorm(name='block_norm')(kept)))
        h = nn.Dense(d, name='decoder_embed')(kept)
        mask = jnp.broadcast_to(self.param('mask_token', nn.initializers.normal(), (1, 1, d)), (b, 2, d))
        h = jnp.take_along_axis(jnp.concatenate([h, mask], 1), jnp.argsort(order, axis=1)[..., None], 1)
        h = h + self.param('decoder_pos_embed', nn.initializers.normal(), (1, 4, d))
        y = nn.gelu(nn.Dense(2 * d, name='decoder_up')(nn.LayerNorm(name='decoder_norm')(h)))
        size = jnp.sqrt(jnp.sum(jnp.square(y), axis=1, keepdims=True) + 1e-6)
        gamma = self.param('grn_gamma', nn.initializers.zeros, (1, 1, 2 * d))
        beta = self.param('grn_beta', nn.initializers.zeros, (1, 1, 2 * d))
        y = y + gamma * (y * (size / (size.mean(-1, keepdims=True) + 1e-6))) + beta
        return nn.Dense(48, name='decoder_pred')(h + nn.Dense(d, name='decoder_down')(y))


def test_a_masked_autoencoder_with_response_normalization():
    check(roles_of(MaskedAutoencoder(), IMAGES, jnp.zeros((2, 4))), '''
        patch_embed.kernel input 0>1
        patch_embed.bias bias
        pos_embed position
        block_norm.scale norm
        block_norm.bias norm
        block.fc*.kernel hidden 0>1
        block.fc*.bias bias
        norm.scale norm
        norm.bias norm
        decoder_embed.kernel hidden 0>1
        decoder_embed.bias bias
        mask_token position
        decoder_pos_embed position
        decoder_norm.scale norm
        decoder_norm.bias norm
        decoder_up.kernel hidden 0>1
        decoder_up.bias bias
        grn_gamma scale
        grn_beta bias
        decoder_down.kernel hidden 0>1
        decoder_down.bias bias
        decoder_pred.kernel head 0>1
        decoder_pred.bias bias
    ''')


class WindowAttention(nn.Module):
    """Shifted windows with a table of relative positions, and merging of patches."""

    @nn.compact
    def __call__(self, x):
        b, h, w, d = x.shape
        windows = jnp.roll(x, (-1, -1), (1, 2)).reshape(b, h // 2, 2, w // 2, 2, d).swapaxes(2, 3).reshape(-1, 4, d)
        qkv = nn.Dense(3 * d, name='qkv')(windows).reshape(-1, 4, 3, 2, d // 2).transpose(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        table = self.param('relative_position_bias_table', nn.initializers.normal(), (9, 2))
        place = jnp.stack(jnp.meshgrid(jnp.arange(2), jnp.arange(2), indexing='ij')).reshape(2, -1)
        offset = place[:, :, None] - place[:, None, :] + 1
        bias = table[(3 * offset[0] + offset[1]).reshape(-1)].reshape(4, 4, 2).transpose(2, 0, 1)
        scale = jnp.exp(self.param('logit_scale', nn.initializers.zeros, (2, 1, 1)))
        y = nn.softmax(q @ k.swapaxes(-2, -1) * scale + bias) @ v
        y = nn.Dense(d, name='proj')(y.transpose(0, 2, 1, 3).reshape(-1, 4, d))
        return y.reshape(b, h // 2, w // 2, 2, 2, d).swapaxes(2, 3).reshape(b, h, w, d)


class Swin(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm(name='patch_norm')(nn.Conv(8, (2, 2), (2, 2), name='patch_embed')(x))
        for i in range(2):
            x = x + WindowAttention(name=f'attn{i}')(nn.LayerNorm(name=f'norm{i}')(x))
        x = jnp.concatenate([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        x = nn.Dense(16, use_bias=False, name='reduction')(nn.LayerNorm(name='merge_norm')(x))
        return nn.Dense(3, name='head')(x.mean((1, 2)))


def test_shifted_windows_with_relative_positions():
    check(roles_of(Swin(), IMAGES), '''
        patch_embed.kernel input 0,1,2>3
        patch_embed.bias bias
        patch_norm.scale norm
        patch_norm.bias norm
        norm*.scale norm
        norm*.bias norm
        attn*.qkv.kernel hidden 0>1 parts=3
        attn*.qkv.bias bias
        attn*.relative_position_bias_table position
        attn*.logit_scale scale
        attn*.proj.kernel hidden 0>1
        attn*.proj.bias bias
        merge_norm.scale norm
        merge_norm.bias norm
        reduction.kernel hidden 0>1
        head.kernel head 0>1
        head.bias bias
    ''')


class Recommender(nn.Module):
    """A table for each of three columns, and the products of their rows."""

    @nn.compact
    def __call__(self, numbers, columns):
        tables = self.param('tables', nn.initializers.normal(), (3, 10, 8))
        rows = jax.vmap(lambda table, index: table[index], (0, 1), 1)(tables, columns)
        h = nn.relu(nn.Dense(8, name='bottom')(numbers))
        x = jnp.concatenate([h[:, None], rows], 1)
        pairs = jnp.einsum('bid,bjd->bij', x, x).reshape(len(x), -1)
        h = nn.relu(nn.Dense(8, name='top')(jnp.concatenate([h, pairs], -1)))
        return nn.Dense(1, name='click')(h)


def test_stacked_tables():
    check(roles_of(Recommender(), jnp.zeros((2, 5)), jnp.zeros((2, 3), jnp.int32)), '''
        tables embedding 1>2 stacked=0
        bottom.kernel input 0>1
        bottom.bias bias
        top.kernel hidden 0>1
        top.bias bias
        click.kernel head 0>1
        click.bias bias
    ''')
