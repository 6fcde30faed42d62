"""The published forward passes in plain numpy, for one environment.

Independent of the package: observations in, actions out, flat weights in file order.
"""

from collections.abc import Iterator

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    """Softmax over the last dimension."""
    raised = np.exp(x - x.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def normalized(x: Array) -> Array:
    """Layer normalization of the last dimension without weights."""
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)


def table(rows: int, width: int) -> Array:
    out = np.zeros((rows, width))
    for i in range(rows):
        for j in range(width):
            angle = i / 10_000 ** (2 * (j // 2) / width)
            out[i, j] = np.sin(angle) if j % 2 == 0 else np.cos(angle)
    return out.astype(np.float32).astype(np.float64)


class Flat:
    """A flat array, read from start to end."""

    def __init__(self, params: Array) -> None:
        self.params, self.at = params.astype(np.float64), 0

    def select(self, *shape: int) -> Array:
        size = int(np.prod(shape))
        self.at += size
        return self.params[self.at - size : self.at].reshape(shape)

    def linear(self, outputs: int, inputs: int) -> tuple[Array, Array]:
        return self.select(outputs, inputs), self.select(outputs)

    def lstm(self, units: int, inputs: int) -> tuple[Array, Array, Array, Array]:
        gates = 4 * units
        return (
            self.select(gates, inputs),
            self.select(gates, units),
            self.select(gates),
            self.select(gates),
        )

    def done(self) -> None:
        assert self.at == len(self.params)


def apply(layer: tuple[Array, Array], x: Array) -> Array:
    weight, bias = layer
    return x @ weight.T + bias


def cell(
    weights: tuple[Array, Array, Array, Array], x: Array, h: Array, c: Array
) -> tuple[Array, Array]:
    w_ih, w_hh, b_ih, b_hh = weights
    gates = x @ w_ih.T + b_ih + h @ w_hh.T + b_hh
    i, f, g, o = np.split(gates, 4, axis=-1)
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return sigmoid(o) * np.tanh(c), c


def ant_mlp(params: Array, readings: Array) -> Iterator[Array]:
    flat = Flat(params)
    layers = flat.linear(32, 28), flat.linear(32, 32), flat.linear(8, 32)
    flat.done()
    for x in readings:
        for layer in layers:
            x = np.tanh(apply(layer, x))
        yield x


def ant_pi(params: Array, readings: Array) -> Iterator[Array]:
    flat = Flat(params)
    lstm = flat.lstm(8, 9)
    query, key = flat.linear(32, 8), flat.linear(32, 8)
    hidden, out = flat.linear(32, 32), flat.linear(8, 32)
    flat.done()
    h = c = np.zeros((28, 8))
    action, queries = np.zeros(8), apply(query, table(32, 8))
    for x in readings:
        inputs = np.concatenate([x[:, None], np.tile(action, (28, 1))], 1)
        h, c = cell(lstm, inputs, h, c)
        scores = queries @ apply(key, h).T / np.sqrt(32)
        codes = np.tanh(np.tanh(scores) @ x)
        action = np.tanh(apply(out, np.tanh(apply(hidden, codes))))
        yield action


def top_ten(
    query: tuple[Array, Array], key: tuple[Array, Array], x: Array, scale: float
) -> Array:
    shares = softmax(apply(query, x) @ apply(key, x).T / scale)
    return np.argsort(-shares.sum(0), kind="stable")[:10]


def carracing(params: Array, pictures: Array) -> Iterator[Array]:
    """``(T, 96, 96, 3)`` bytes, red first."""
    flat = Flat(params)
    query, key = flat.linear(4, 147), flat.linear(4, 147)
    lstm, out = flat.lstm(16, 20), flat.linear(3, 16)
    flat.done()
    h = c = np.zeros(16)
    for picture in pictures:
        corners = [(4 * i, 4 * j) for i in range(23) for j in range(23)]
        patches = [picture[y : y + 7, x : x + 7] / 255 for y, x in corners]
        top = top_ten(query, key, np.stack(patches).reshape(529, -1), np.sqrt(4))
        centers = np.array([(y + 3, x + 3) for y, x in corners]) / 96
        h, c = cell(lstm, centers[top].ravel(), h, c)
        yield np.tanh(apply(out, h))


def carracing_pi(params: Array, stacks: Array) -> Iterator[Array]:
    """``(T, 4, 96, 96)`` bytes, the oldest frame first."""
    flat = Flat(params)
    query, key, value = flat.linear(16, 8), flat.linear(16, 111), flat.linear(16, 144)
    attend_query, attend_key = flat.linear(4, 16), flat.linear(4, 16)
    lstm, out = flat.lstm(16, 20), flat.linear(3, 16)
    mix, mixed = flat.linear(16, 19), flat.linear(1, 16)
    flat.done()
    h = c = np.zeros(16)
    action, held, alpha = np.zeros(3), np.zeros((1024, 16)), 0.0
    queries = apply(query, table(1024, 8))
    for stack in stacks:
        stack = stack / 255
        patches = [
            stack[:, 6 * i : 6 * i + 6, 6 * j : 6 * j + 6]
            for i in range(16)
            for j in range(16)
        ]
        keys, values = [], []
        for patch in patches:
            moved = patch[1:] - patch[:-1]
            # Pixel by pixel, a pixel's three differences side by side.
            by_pixel = [moved[f, y, x] for y, x in np.ndindex(6, 6) for f in range(3)]
            keys.append(np.concatenate([by_pixel, action]))
            # Frame by frame, each normalized by itself.
            values.append(normalized(patch.reshape(4, 36)).ravel())
        scores = queries @ apply(key, np.stack(keys)).T / np.sqrt(16)
        codes = softmax(scores) @ apply(value, np.stack(values))
        held = (1 - alpha) * normalized(np.maximum(codes, 0)) + alpha * held
        top = top_ten(attend_query, attend_key, held, 1.0)
        places = np.stack([top // 32, top % 32], 1) / 32
        h, c = cell(lstm, places.ravel(), h, c)
        action = np.tanh(apply(out, h))
        gate = np.tanh(apply(mix, np.concatenate([h, action])))
        alpha = sigmoid(apply(mixed, gate))
        yield action
