"""Test the decoder-only transformer, and the constraint of its shardings."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jengine import load_config
from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.extras.diagnose.labels import find_wrong_labels
from jengine.extras.networks import TransformerLM
from jengine.extras.networks.constrain import constrain
from jengine.extras.networks.rotary import make_scaling, rotate
from jengine.extras.networks.transformer import PlusOneRMSNorm
from jengine.model import CrossEntropy, LinenModel, parameter_roles
from jengine.parallel import Placement, build_mesh
from tests.refusals import check_refusal

CONFIG = pathlib.Path(__file__).parents[3] / "configs" / "lm.py"
SMALL = dict(vocab_size=11, width=8, depth=3, heads=2, mlp_width=12)
TOKENS = np.random.RandomState(0).randint(0, 11, (2, 6))


@pytest.fixture(scope="module")
def params():
    return jax.jit(TransformerLM(**SMALL).init)(jax.random.key(0), TOKENS)["params"]


def test_the_parameters_of_the_blocks_are_stacked_and_differ(params):
    shapes = {path: leaf.shape for path, leaf in paths.flatten(params).items()}
    assert shapes == {
        "embed.embedding": (11, 8),
        "layers.attn_norm.scale": (3, 8),
        "layers.attn.query.kernel": (3, 8, 2, 4),
        "layers.attn.key.kernel": (3, 8, 2, 4),
        "layers.attn.value.kernel": (3, 8, 2, 4),
        "layers.attn.out.kernel": (3, 2, 4, 8),
        "layers.mlp_norm.scale": (3, 8),
        "layers.mlp.gate.kernel": (3, 8, 12),
        "layers.mlp.up.kernel": (3, 8, 12),
        "layers.mlp.down.kernel": (3, 12, 8),
        "norm.scale": (8,),
        "head.kernel": (8, 11),
    }
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    assert float(jnp.abs(kernel[0] - kernel[1]).max()) > 0.1


def test_logits_depend_only_on_earlier_tokens(params):
    model = TransformerLM(**SMALL)
    apply = jax.jit(model.apply)
    logits = apply({"params": params}, TOKENS)
    changed = TOKENS.copy()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    difference = np.abs(apply({"params": params}, changed) - logits).max(axis=(0, 2))
    assert logits.shape == (2, 6, 11)
    assert difference[:4].max() == 0
    assert difference[4:].min() > 1e-3


MIXED = dict(
    SMALL, window=2, full_blocks=(1,), rotary_base=3000.0, local_rotary_base=50.0, norm="rms_plus_one", post_norm=True,
    query_key_norm=True, attention_cap=2.0, logits_cap=3.0, embed_scale=4.0, attention_scale=0.3, bias="qkv",
)  # fmt: skip


def test_blocks_of_two_kinds_in_a_scan_compute_what_single_blocks_do():
    scanned = TransformerLM(**MIXED)
    params = jax.jit(scanned.init)(jax.random.key(0), TOKENS)["params"]
    params = jax.tree.map(lambda x: x + 0.1, params)  # so that no bias and no scale is zero
    single = {name: leaf for name, leaf in params.items() if name != "layers"}
    single |= {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(3)}

    def loss(params, scan):
        return jnp.square(TransformerLM(**MIXED, scan=scan).apply({"params": params}, TOKENS)).sum()

    value, gradients = jax.jit(jax.value_and_grad(functools.partial(loss, scan=True)))(params)
    expected, others = jax.jit(jax.value_and_grad(functools.partial(loss, scan=False)))(single)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for i in range(3):
        stacked = jax.tree.map(lambda x, i=i: x[i], gradients["layers"])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), stacked, others[f"layers_{i}"]
        )


@pytest.mark.parametrize(("full_blocks", "reached"), [((), [0]), ((1,), [0, 1, 2, 3, 4, 5])])
def test_blocks_without_a_window_reach_all_later_tokens(full_blocks, reached):
    model = TransformerLM(**dict(SMALL, depth=2), window=1, full_blocks=full_blocks)
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    changed = np.concatenate([(TOKENS[:, :1] + 1) % 11, TOKENS[:, 1:]], axis=1)
    first, second = (jax.jit(model.apply)({"params": params}, tokens) for tokens in (TOKENS, changed))
    assert np.flatnonzero(np.abs(first - second).max(axis=(0, 2)) > 1e-6).tolist() == reached


def test_a_norm_that_adds_one_to_its_scale_starts_as_the_other_and_is_computed_in_float32():
    models = [TransformerLM(**SMALL, norm=norm) for norm in ("rms", "rms_plus_one")]
    plain, added = (jax.jit(model.init)(jax.random.key(0), TOKENS)["params"] for model in models)
    assert not np.any(added["norm"]["scale"])
    first, second = (jax.jit(m.apply)({"params": x}, TOKENS) for m, x in zip(models, (plain, added), strict=True))
    np.testing.assert_allclose(first, second, atol=1e-5)
    x = jnp.asarray([[3.0, 4.0]], jnp.bfloat16)
    y = PlusOneRMSNorm(1e-6).apply({"params": {"scale": jnp.full(2, 0.003, jnp.bfloat16)}}, x)
    # 1.003 would be 1 in bfloat16: 3 / 3.5355 = 0.8485 is stored as 0.8477, which 1.003 makes 0.8516
    assert (y.dtype, float(y[0, 0])) == (jnp.bfloat16, 0.8515625)


def test_the_parameters_of_all_variants_have_the_roles_of_what_they_do():
    model = LinenModel(TransformerLM(**MIXED), CrossEntropy("targets"), inputs="tokens")
    batch = dict(tokens=TOKENS, targets=TOKENS)
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    roles = parameter_roles(model, params, batch=batch)
    kinds = {path: role.kind for path, role in roles.items() if path.endswith(("scale", "bias"))}
    norms = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm", "attn.query_norm", "attn.key_norm")
    assert kinds == {
        "norm.scale": "norm",
        **{f"layers.{name}.scale": "norm" for name in norms},
        **{f"layers.attn.{name}.bias": "bias" for name in ("query", "key", "value")},
    }
    assert roles["layers.attn.query.kernel"].kind == "hidden"
    assert roles["layers.attn.query_norm.scale"].stacked == (0,)


def test_remat_changes_what_is_kept_for_the_backward_pass_but_no_gradient(params):
    def loss(params, remat):
        return jnp.square(TransformerLM(**SMALL, remat=remat).apply({"params": params}, TOKENS)).sum()

    products = "dots_with_no_batch_dims_saveable"
    plain, *others = (
        jax.jit(jax.grad(functools.partial(loss, remat=remat)))(params) for remat in (False, True, products, "offload")
    )
    for gradients in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, gradients)

    def count_kept(remat):
        backward = jax.eval_shape(lambda params: jax.vjp(functools.partial(loss, remat=remat), params)[1], params)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    assert count_kept(True) < count_kept(False) / 2
    # The inputs of the three blocks, stacked, are on the host in between.
    programs = {
        remat: jax.make_jaxpr(jax.grad(functools.partial(loss, remat=remat)))(params) for remat in (True, "offload")
    }
    assert "f32<host>[3,2,6,8]" in str(programs["offload"])
    assert "<host>" not in str(programs[True])
    assert count_kept(True) == count_kept("nothing_saveable") < count_kept(products) < count_kept(False)


def test_scores_depend_on_the_distance_of_rotated_queries_and_keys():
    x = jnp.broadcast_to(jnp.arange(1.0, 9.0), (1, 6, 1, 8))
    rotated = rotate(x)[0, :, 0]
    scores = rotated @ rotated.T
    np.testing.assert_allclose(np.diag(scores, 1), np.full(5, scores[0, 1]), rtol=1e-5)
    np.testing.assert_allclose(np.diag(scores, 3), np.full(3, scores[0, 3]), rtol=1e-5)
    assert abs(float(scores[0, 1] - scores[0, 3])) > 1
    assert rotate(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_the_gradient_for_tpus_is_that_of_the_rotation(monkeypatch):
    x, y = (jax.random.normal(jax.random.key(i), (2, 5, 3, 8)) for i in range(2))

    def loss(x):
        return jnp.sum(y * jnp.sin(rotate(x, scale=0.3)))

    expected = jax.grad(loss)(x)
    (_, curvature) = jax.jvp(jax.grad(loss), (x,), (y,))
    monkeypatch.setattr("jengine.extras.networks.rotary.get_platform", lambda: "tpu")
    np.testing.assert_allclose(jax.grad(loss)(x), expected, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(y * jax.grad(loss)(x)))(x), curvature, atol=1e-6)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x,), (y,))


@pytest.mark.parametrize(
    ("scaling", "frequencies", "amplitude"),
    [
        (None, [1, 0.1, 0.01, 0.001], 1),
        (dict(kind="linear", factor=4.0), [0.25, 0.025, 0.0025, 0.00025], 1),
        # Periods in 8192 tokens are 1304, 130, 13.04, and 1.3038: of the last, (1.3038 - 1) / (4 - 1) = 0.10127 is kept.
        (
            dict(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192),
            [1, 0.1, 0.01, 0.001 * (0.10127 + 0.89873 / 8)],
            1,
        ),
        # 32 periods are at the channel 4 ln(4096 / 64 pi) / ln(10000) = 1.3, one is at 2.8: from 1 to 3, so half of the
        # third one is kept. The amplitude is 0.1 ln(4) + 1.
        (
            dict(kind="yarn", factor=4.0, original_length=4096),
            [1, 0.1, 0.01 * (0.5 + 0.5 / 4), 0.00025],
            1.1386294,
        ),
        # Without rounding, (2 - 1.30901) / (2.81416 - 1.30901) = 0.45908 of the third one is slowed down.
        (
            dict(kind="yarn", factor=4.0, original_length=4096, truncate=False, attention_factor=2.0),
            [1, 0.1, 0.01 * (0.54092 + 0.45908 / 4), 0.00025],
            2,
        ),
        # In a context that no wave fits into, all are kept, as in transformers 5.24.
        (
            dict(kind="yarn", factor=8.0, original_length=2, truncate=False),
            [1, 0.1, 0.01, 0.001],
            1.2079442,
        ),
    ],
)
def test_scaled_rotations_have_the_frequencies_of_the_formulas(scaling, frequencies, amplitude):
    x = jnp.concatenate([jnp.ones((1, 2, 1, 4)), jnp.zeros((1, 2, 1, 4))], axis=-1)
    first, second = jnp.split(rotate(x, 10_000.0, make_scaling(scaling))[0, 1, 0], 2)  # at position 1
    np.testing.assert_allclose(jnp.atan2(second, first), frequencies, rtol=3e-5)
    np.testing.assert_allclose(jnp.hypot(first, second), np.full(4, amplitude), rtol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        (dict(factor=2.0), ["`rotary_scaling.kind`", "got None"]),
        (dict(kind="linear", factor=0.0), ["factor"]),
        (dict(kind="linear", factor=2.0, beta_fast=3.0), ["beta_fast"]),
    ],
)
def test_a_scaling_with_other_settings_is_refused(scaling, words):
    check_refusal(lambda: TransformerLM(**SMALL, rotary_scaling=scaling).init(jax.random.key(0), TOKENS), (ConfigError, TypeError, ValueError), *words)


def test_a_constraint_uses_the_axes_of_the_mesh_that_divide_and_none_without_a_mesh():
    x = jnp.ones((8, 6))
    assert constrain(x, ("data", "fsdp")) is x
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def spec(*axes):
        def constrained(x):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return constrain(x, *axes)

        replicated = jax.NamedSharding(mesh, PartitionSpec())
        return jax.jit(constrained)(jax.device_put(x, replicated)).sharding.spec

    assert spec(("data", "fsdp"), "tensor") == PartitionSpec(("data", "fsdp"), "tensor")
    assert spec(None, ("data", "fsdp")) == PartitionSpec()  # 4 devices do not divide 6
    assert spec("model") == PartitionSpec()


def test_tokens_divided_over_a_mesh_have_the_gradients_of_one_device():
    model = TransformerLM(
        **{**SMALL, "vocab_size": 48, "width": 16, "mlp_width": 16}, window=5, remat=False, logits_chunk=8
    )
    rng = np.random.RandomState(0)
    tokens, targets = rng.randint(0, 48, (2, 4, 32))
    segments = np.repeat([[0, 1, 2, 2]] * 4, 8, axis=1)
    positions = np.concatenate([np.arange(8), np.arange(8), np.arange(16)]) * np.ones((4, 1), int)
    variables = jax.jit(model.init)(jax.random.key(0), tokens)

    def total(variables, *inputs):
        logits = model.apply(variables, *inputs, train=True)
        return CrossEntropy()(logits, {"label": targets})["loss"].mean()

    def step(mesh=None):
        compiled = jax.jit(jax.value_and_grad(total))
        if mesh is None:
            return compiled(variables, tokens, segments, positions)
        placed = Placement(mesh, load_config(f"{CONFIG}:toy").parallel.rules).place(variables)
        leaves = paths.map_with_path(
            lambda path, x: jax.device_put(x, jax.NamedSharding(mesh, placed[path].spec)), variables
        )
        batch = jax.device_put((tokens, segments, positions), jax.NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            program = compiled.lower(leaves, *batch).compile()
        # A chunk of 8 tokens: half of the examples, the tokens and the words are on a device.
        assert "f32[2,4,24]" in program.as_text()
        return program(leaves, *batch)

    loss, gradients = step()
    divided_loss, divided = step(build_mesh(dict(data=1, fsdp=2, context=2, tensor=2)))
    np.testing.assert_allclose(divided_loss, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), divided, gradients)


def test_tokens_outside_of_the_vocabulary_make_the_loss_nan_and_are_named_also_where_nothing_is_learned():
    model = LinenModel(TransformerLM(**SMALL), loss=CrossEntropy(label="targets", ignore_index=-1), inputs="tokens")
    tokens = np.array([[1, 2, 3, 4]], np.int32)
    batch = dict(tokens=tokens, targets=np.array([[-1, 3, 4, -1]], np.int32))
    variables = model.init(jax.random.key(0), batch)

    def compute_loss(batch):
        losses, _ = model.loss(*variables, batch, rng=jax.random.key(0), hyperparams={})
        return losses["loss"][0] / losses["loss"][1]

    assert np.isfinite(compute_loss(batch))
    assert find_wrong_labels(compute_loss, batch) is None
    for wrong, found in ((-1, "-1 to 4"), (11, "2 to 11")):
        bad = dict(batch, tokens=np.where(tokens == 1, wrong, tokens))
        assert np.isnan(compute_loss(bad))
        assert "`TransformerLM.tokens` must be from 0 to 10, as vocab_size = 11" in find_wrong_labels(compute_loss, bad)
        assert f"got {found} in the entry 'tokens'" in find_wrong_labels(compute_loss, bad)
