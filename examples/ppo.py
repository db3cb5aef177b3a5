"""Train PPO on CartPole, with the environments in the compiled step (JAX) or on the host (NumPy).

    python examples/ppo.py --env jax     # as in https://github.com/luchris429/purejaxrl
    python examples/ppo.py --env host    # as in https://github.com/vwxyzjn/cleanrl

Both forms share the network, the loss and the update. `--resume` continues from the newest
checkpoint, bit for bit.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from jengine import Runner
from jengine.model import FunctionalModel

GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.2
EPOCHS = 4
MINIBATCHES = 4


class ActorCritic(nn.Module):
    """Return the logits of two actions f[B, 2] and the value f[B] of observations f[B, 4]."""

    @nn.compact
    def __call__(self, x):
        """Apply two networks."""
        actor, critic = (nn.tanh(nn.Dense(64)(nn.tanh(nn.Dense(64)(x)))) for _ in range(2))
        logits = nn.Dense(2, kernel_init=nn.initializers.orthogonal(0.01))(actor)
        return logits, nn.Dense(1)(critic).squeeze(-1)


NETWORK = ActorCritic()


def init_params(rng):
    """Return the parameters of both networks."""
    return NETWORK.init(rng, jnp.zeros((1, 4)))


def reset(start, xp):
    """Return the state of environments that begin at `start`, f32[N, 4]; `xp` is jnp in the
    step, np on the host.
    """
    return dict(
        obs=start,
        steps=xp.zeros(len(start), xp.int32),
        last_return=xp.zeros(len(start), xp.float32),
    )


def env_step(envs, action, start, xp):
    """Return the state after a step of CartPole-v1, rewards, and which episodes ended: these
    begin anew at `start`.
    """
    _, speed, angle, spin = xp.moveaxis(envs["obs"], -1, 0)
    sin = xp.sin(angle)
    cos = xp.cos(angle)
    push = (xp.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * sin) / 1.1
    spin_change = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    speed_change = push - 0.05 * spin_change * cos / 1.1
    change = xp.stack([speed, speed_change, spin, spin_change], -1)
    obs = (envs["obs"] + 0.02 * change).astype(xp.float32)
    steps = envs["steps"] + 1
    done = (abs(obs[:, 0]) > 2.4) | (abs(obs[:, 2]) > 0.2095) | (steps == 500)
    # each step is rewarded with 1, so the return of an episode is its length
    last_return = xp.where(done, steps, envs["last_return"]).astype(xp.float32)
    moved = dict(
        obs=xp.where(done[:, None], start, obs),
        steps=xp.where(done, 0, steps),
        last_return=last_return,
    )
    return moved, xp.ones(len(done), xp.float32), done


def act(params, obs, rng):
    """Draw actions of the policy; return them with their log probabilities and the values."""
    logits, value = NETWORK.apply(params, obs)
    action = jax.random.categorical(rng, logits)
    log_prob = -optax.softmax_cross_entropy_with_integer_labels(logits, action)
    return dict(obs=obs, action=action, log_prob=log_prob, value=value)


def make_examples(params, trajectory, last_obs):
    """Return the steps of a rollout as examples f[T * N, ...], with generalized advantages and
    targets of the value.
    """

    def step(carry, t):
        advantage, next_value = carry
        delta = t["reward"] + GAMMA * next_value * (1 - t["done"]) - t["value"]
        advantage = delta + GAMMA * GAE_LAMBDA * (1 - t["done"]) * advantage
        return (advantage, t["value"]), advantage

    last_value = NETWORK.apply(params, last_obs)[1]
    _, advantage = jax.lax.scan(
        step, (jnp.zeros_like(last_value), last_value), trajectory, reverse=True
    )
    examples = {**trajectory, "advantage": advantage, "target": advantage + trajectory["value"]}
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), examples)


def shuffle(rng, examples):
    """Return the examples in a random order, as minibatches along the first axis."""
    order = jax.random.permutation(rng, len(examples["action"]))
    return jax.tree.map(lambda x: x[order].reshape(MINIBATCHES, -1, *x.shape[1:]), examples)


def ppo_loss(params, minibatch):
    """Return the three losses of PPO, whose sum is minimized."""
    logits, value = NETWORK.apply(params, minibatch["obs"])
    log_prob = -optax.softmax_cross_entropy_with_integer_labels(logits, minibatch["action"])
    ratio = jnp.exp(log_prob - minibatch["log_prob"])
    advantage = (minibatch["advantage"] - minibatch["advantage"].mean()) / (
        minibatch["advantage"].std() + 1e-8
    )
    actor = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage).mean()
    clipped = minibatch["value"] + jnp.clip(value - minibatch["value"], -CLIP, CLIP)
    errors = jnp.maximum((value - minibatch["target"]) ** 2, (clipped - minibatch["target"]) ** 2)
    entropy = -(nn.softmax(logits) * nn.log_softmax(logits)).sum(-1).mean()
    return dict(loss_actor=-actor, loss_critic=0.25 * errors.mean(), loss_entropy=-0.01 * entropy)


def update(state, trajectory, envs, ctx):
    """Update the parameters for some epochs with the examples of a rollout; return the state and
    the metrics.
    """
    examples = make_examples(state.params, trajectory, envs["obs"])

    def update_minibatch(state, minibatch):
        return ctx.update(state, lambda params: ppo_loss(params, minibatch))

    def update_epoch(state, rng):
        return jax.lax.scan(update_minibatch, state, shuffle(rng, examples))

    state, metrics = jax.lax.scan(update_epoch, state, jax.random.split(ctx.rng, EPOCHS))
    return state, {**jax.tree.map(jnp.mean, metrics), "return": envs["last_return"].mean()}


def update_from_host(state, batch, ctx):
    """Update the parameters with a batch of `Rollouts`."""
    return update(state, **batch, ctx=ctx)


def rollout(params, envs, rng, length):
    """Return the new state of the environments and `length` steps of each, with arrays [length,
    N, ...].
    """

    def step(envs, rng):
        action_key, start_key = jax.random.split(rng)
        acted = act(params, envs["obs"], action_key)
        start = jax.random.uniform(start_key, envs["obs"].shape, minval=-0.05, maxval=0.05)
        envs, reward, done = env_step(envs, acted["action"], start, jnp)
        return envs, {**acted, "reward": reward, "done": done}

    return jax.lax.scan(step, envs, jax.random.split(rng, length))


def build_jax_model(count, length):
    """Return a model with `count` environments in its step; their state is the `model_state`,
    and so in checkpoints.
    """

    def init(rng):
        param_key, start_key = jax.random.split(rng)
        start = jax.random.uniform(start_key, (count, 4), minval=-0.05, maxval=0.05)
        return init_params(param_key), reset(start, jnp)

    def train_step(state, batch, ctx):
        envs, trajectory = rollout(state.params, state.model_state, ctx.fold_in(0).rng, length)
        return update(state.replace(model_state=envs), trajectory, envs, ctx.fold_in(1))

    return FunctionalModel(init, train_step=train_step)


class Rollouts:
    """Yield rollouts of the current policy on the host; `state_dict` is in checkpoints."""

    # no rollout with old parameters; arrays [length, N, ...]
    device_prefetch = 0
    batch_axis = None
    # replicas get a share of the environments
    batch_rules = (("trajectory", (None, "data")), ("envs", ("data",)))

    def __init__(self, count, length, get_state):
        self.length, self.get_state, self.act = length, get_state, jax.jit(act)
        self.key, self.random = jax.random.key(0), np.random.default_rng(0)
        self.envs = reset(self.draw_start(count), np)

    def draw_start(self, count):
        """Return random states f32[count, 4]."""
        return self.random.uniform(-0.05, 0.05, (count, 4)).astype(np.float32)

    def __iter__(self):
        while True:
            state = self.get_state()
            steps = []
            # there is no state yet when the first batch shows the shapes
            params = init_params(self.key) if state is None else state.params
            for _ in range(self.length):
                self.key, action_key = jax.random.split(self.key)
                acted = jax.device_get(self.act(params, self.envs["obs"], action_key))
                start = self.draw_start(len(acted["action"]))
                self.envs, reward, done = env_step(self.envs, acted["action"], start, np)
                steps.append({**acted, "reward": reward, "done": done})
            yield dict(trajectory=jax.tree.map(lambda *x: np.stack(x), *steps), envs=self.envs)

    def state_dict(self):
        """Return what the next rollout depends on."""
        return dict(envs=self.envs, key=self.key, random=self.random.bit_generator.state)

    def load_state_dict(self, state):
        """Continue from a checkpoint."""
        self.envs = state["envs"]
        self.key = state["key"]
        self.random.bit_generator.state = state["random"]


def main(
    env="jax",
    max_iters=200,
    envs=16,
    length=64,
    work_dir="work_dirs/ppo",
    save_every=50,
    **settings,
) -> Runner:
    """Train with rollouts of `length` steps in `envs` environments; return the Runner, which
    gets `settings`.
    """
    if env == "jax":
        model = dict(type=build_jax_model, count=envs, length=length)
        devices = jax.device_count()
        # a placeholder, with an example per replica
        data = dict(dataset=[0.0] * devices, batch_size=devices)
    else:
        model = FunctionalModel(init_params, train_step=update_from_host)
        data = Rollouts(envs, length, lambda: runner.state)
    runner = Runner(
        model,
        work_dir,
        train_dataloader=data,
        # with JAX 10 iterations are one call; on the host each rollout waits for the update before
        # it
        train_cfg=dict(
            by_epoch=False, max_iters=max_iters, steps_per_call=10 if env == "jax" else 1
        ),
        optim_wrapper=dict(
            optimizer=dict(type="Adam", lr=2.5e-3, eps=1e-5), clip_grad=dict(max_norm=0.5)
        ),
        param_scheduler=dict(
            type="LinearLR", start_factor=1.0, end_factor=0.0, end=max_iters, by_epoch=False
        ),
        default_hooks=dict(
            checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=save_every)
        ),
        **settings,
    )
    runner.train()
    return runner


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", choices=["jax", "host"], default="jax")
    parser.add_argument("--max-iters", type=int, default=200)
    parser.add_argument("--work-dir", default="work_dirs/ppo")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--parallel", choices=["DataParallel"], help="train on all devices")
    args = parser.parse_args()
    work_dir = f"{args.work_dir}/{args.env}"
    parallel = args.parallel and dict(type=args.parallel)
    main(args.env, args.max_iters, work_dir=work_dir, resume=args.resume, parallel=parallel)
