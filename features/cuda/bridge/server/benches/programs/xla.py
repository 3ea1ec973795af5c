"""JAX: a network's training, compiled by XLA, to the last bit."""

import hashlib
import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["XLA_FLAGS"] = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
import jax
import jax.numpy as jnp
import numpy as np

keys = jax.random.split(jax.random.key(0), 4)
weights = [jax.random.normal(key, shape) * 0.05 for key, shape in zip(keys, ((256, 512), (512, 512), (512, 16)))]
x, y = jax.random.normal(keys[3], (128, 256)), jnp.arange(128) % 16


def loss(weights):
    a, b, c = weights
    scores = jnp.tanh(jnp.tanh(x @ a) @ b) @ c
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), y[:, None], 1).mean()


step = jax.jit(lambda weights: [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights))])
for _ in range(20):
    weights = step(weights)
print("loss", float(loss(weights)).hex())
print("weights", hashlib.sha256(b"".join(np.asarray(w).tobytes() for w in weights)).hexdigest())
