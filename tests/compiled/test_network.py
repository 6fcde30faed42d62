"""The compiled kernel, against the package's own modules in float64."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from helpers.set_networks import (
    HEADS,
    LAYOUTS,
    WIDTHS,
    Doubled,
    assert_same_gradients,
    assert_same_second_gradients,
    errors,
    make_tokens,
    needs_kernel,
    results,
)
from helpers.set_networks import make_network as make_plain
from marl_pool.compiled import CompiledSetNetwork, compile
from marl_pool.compiled.choice import use_kernels
from marl_pool.compiled.native import call
from marl_pool.networks.set_network import SetNetwork
from marl_pool.options.types import Kernels
from marl_pool.pooling.base import Pooling
from marl_pool.tokens import Tokens, TokenSpec
from marl_pool.utils.devices import torch_threads
from marl_pool.utils.errors import InputError

pytestmark = needs_kernel


def make_network(*args: Any, **options: Any) -> CompiledSetNetwork:
    network = compile(make_plain(*args, **options))
    assert isinstance(network, CompiledSetNetwork)
    return network


def sensitivity(network: SetNetwork, tokens: Tokens) -> float:
    """Return the error of torch's results if each weight changes in its last bit.

    Saturated softmaxes and thin LayerNorms amplify rounding a million times and more.
    """
    generator = torch.Generator().manual_seed(0)
    expected = results(network, tokens, "torch")
    changes = []
    for _ in range(4):  # one change may cancel
        perturbed = copy.deepcopy(network)
        with torch.no_grad():
            for parameter in perturbed.parameters():
                signs = (
                    torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                )
                eps = torch.finfo(parameter.dtype).eps
                parameter += signs.to(parameter) * eps * parameter
        changes += errors(results(perturbed, tokens, "torch"), expected)
    return max(changes)


def is_used(network: SetNetwork, tokens: Tokens) -> bool:
    """Return True if the kernel computes tokens, once the network is compiled."""
    compiled = compile(network)
    if not isinstance(compiled, CompiledSetNetwork):
        return False
    return compiled.computes(tokens, encoder=True)


@given(
    pooling=st.sampled_from(sorted(HEADS)),
    head_width=st.sampled_from(sorted(WIDTHS)),
    num_tokens=st.sampled_from([1, 2, 5, 8, 33]),
    rows=st.sampled_from([1, 3, 16, 17, 130]),
    std=st.sampled_from([0.05, 0.3, 1.0, 3.0]),
    types=st.sampled_from([1, 3]),
    activation=st.sampled_from(["gelu", "relu"]),
    type_embedding=st.sampled_from([0, 4, "add"]),
    input_activation=st.sampled_from([None, "gelu", "relu"]),
    padded=st.booleans(),
    seed=st.integers(0, 99),
)
def test_float64_is_torchs(
    pooling: str, num_tokens: int, rows: int, padded: bool, seed: int, **options: Any
) -> None:
    network = make_network(pooling, num_tokens=num_tokens, seed=seed, **options)
    network.double()
    tokens = make_tokens(network, rows, padded=padded, seed=seed)
    assert is_used(network, tokens)
    expected = results(network, tokens, "torch")
    limit = max(1e-9, 100 * sensitivity(network, tokens))
    assert max(errors(results(network, tokens, "native"), expected)) < limit


@pytest.mark.parametrize("head_width", WIDTHS)
@pytest.mark.parametrize("pooling", ["ada", "max"])
def test_float32_is_as_precise_as_torchs(pooling: str, head_width: int) -> None:
    ratios = []
    for seed in range(5):
        network = make_network(pooling, head_width=head_width, num_tokens=20, seed=seed)
        tokens = make_tokens(network, 40, padded=True, seed=seed)
        exact = results(copy.deepcopy(network).double(), tokens, "torch")
        ours = errors(results(network, tokens, "native"), exact)
        torchs = errors(results(network, tokens, "torch"), exact)
        ratios += [a / b for a, b in zip(ours, torchs, strict=True) if b]
    assert sorted(ratios)[len(ratios) // 2] < 2


@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
@torch.no_grad()
def test_inference_in_float32_is_precise_for_features_of_any_size(size: float) -> None:
    ratios = []
    for seed in range(10):
        network = make_network("avg", seed=seed)
        tokens = make_tokens(network, 40, seed=seed)
        tokens.features.mul_(size)
        double = tokens._replace(features=tokens.features.double())
        with use_kernels("torch"):
            exact = copy.deepcopy(network).double()(double)
            torchs = network(tokens) - exact
        with use_kernels("native"):
            ours = network(tokens) - exact
        ratios.append(float(ours.norm() / torchs.norm()))
    assert sorted(ratios)[len(ratios) // 2] < 3


@pytest.mark.parametrize("bound", [0.9, 1.1, 1.9, 2.1, 3.9, 4.1, 7.9, 8.1, 20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_are_pairs_at_the_edges_of_their_ranges(
    bound: float, dtype: torch.dtype
) -> None:
    network = make_network(num_tokens=12, layers=1, seed=3).double()
    attention = network.encoder.layers[0].attention
    norm = network.encoder.layers[0].attention_norm
    with torch.no_grad():
        # The bound of the scores of each head, as score_bounds in layer.hpp has it.
        norm.weight.fill_(1.0)
        norm.bias.zero_()
        for linear in (attention.to_query, attention.to_key):
            linear.weight -= linear.weight.mean(1, keepdim=True)
            linear.weight /= linear.weight.norm(dim=1, keepdim=True)
        dim = network.encoder.dim
        attention.to_query.weight *= bound / (dim * attention.scale)
    network.to(dtype)
    tokens = make_tokens(network, 30, padded=True)
    exact = results(copy.deepcopy(network).double(), tokens, "torch")
    limit = 1e-11 if dtype == torch.float64 else 2e-5
    assert max(errors(results(network, tokens, "native"), exact)) < limit


@pytest.mark.parametrize("head_width", WIDTHS)
def test_a_row_does_not_depend_on_its_neighbors_or_the_threads(
    head_width: int,
) -> None:
    network = make_network(head_width=head_width, num_tokens=9)
    tokens = make_tokens(network, 300, padded=True)
    row = tokens.map(lambda tensor: tensor[137:138])
    outputs = []
    for count in (1, 3):
        with torch_threads(count):
            outputs.append(results(network, tokens, "native"))
    assert all(map(torch.equal, *outputs))
    with use_kernels("native"), torch.no_grad():
        assert torch.equal(network(row), network(tokens)[137:138])


@pytest.mark.parametrize("std", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("head_width", WIDTHS)
@pytest.mark.parametrize("pooling", ["ada", "avg", "max"])
def test_a_row_does_not_depend_on_the_padding_of_its_neighbors(
    pooling: str, head_width: int, std: float
) -> None:
    """An odd number of tokens, whose last one has no partner in a tile of two."""
    for seed in range(5):
        network = make_network(
            pooling, head_width=head_width, num_tokens=9, std=std, seed=seed
        )
        tokens = make_tokens(network, 64, seed=seed)
        with use_kernels("native"), torch.no_grad():
            expected = network(tokens)
            tokens.padding[::2, 4:] = True
            assert torch.equal(network(tokens)[1::2], expected[1::2])


def far_apart(head_width: int, scale: float) -> SetNetwork:
    """Return a network whose scores are far below what each feature alone allows."""
    network = make_network(head_width=head_width, num_tokens=9, layers=1).double()
    attention = network.encoder.layers[0].attention
    with torch.no_grad():
        query, key = attention.to_query.weight, attention.to_key.weight
        query[1::head_width] = query[::head_width]
        key[1::head_width] = -0.9 * key[::head_width]
        query *= scale
    return network


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("head_width", [2, 3, 4])
def test_a_loose_bound_of_the_scores_loses_nothing(
    head_width: int, padded: bool
) -> None:
    network = far_apart(head_width, 2000.0)
    tokens = make_tokens(network, 40, padded=padded)
    expected = results(network, tokens, "torch")
    assert max(errors(results(network, tokens, "native"), expected)) < 1e-9


@pytest.mark.parametrize("scale", [30.0, 100.0, 300.0])
@pytest.mark.parametrize("head_width", [2, 3, 4])
def test_score_bound_of_a_row_does_not_depend_on_other_rows(
    head_width: int, scale: float
) -> None:
    network = far_apart(head_width, scale)
    tokens = make_tokens(network, 64)
    with use_kernels("native"), torch.no_grad():
        batch = network(tokens)
        for row in range(64):
            single = tokens.map(lambda tensor, row=row: tensor[row : row + 1])
            assert torch.equal(network(single)[0], batch[row])


def test_zero_rows_have_zero_gradients() -> None:
    network = make_network()
    out, *gradients = results(network, make_tokens(network, 0), "native")
    assert out.shape == (0, network.dim_out)
    assert not any(gradient.any() for gradient in gradients)


def test_tensors_in_other_layouts_give_the_same() -> None:
    network = make_network().double()
    tokens = make_tokens(network, 20, padded=True)
    strided = tokens.map(lambda x: x.transpose(0, 1).contiguous().transpose(0, 1))
    strided = strided._replace(types=strided.types.int())
    expected = results(network, tokens, "native")
    assert all(map(torch.equal, results(network, strided, "native"), expected))


@pytest.mark.parametrize(
    ("head_width", "input_activation"),
    [*zip(WIDTHS, 2 * [None, "gelu", "relu"], strict=True)],
)
@pytest.mark.parametrize("pooling", ["ada", "avg", "cls", "max"])
def test_nan_reaches_its_row_and_all_weights(
    pooling: str, input_activation: Any, head_width: int
) -> None:
    options: dict[str, Any] = {"input_activation": input_activation}
    network = make_network(pooling, head_width=head_width, **options)
    tokens = make_tokens(network, 20)
    tokens.features[5, 1, 2] = math.nan
    tokens.padding[5, 6] = True
    out, features, *_ = results(network, tokens, "native")
    assert (out.isnan().any(1) == (torch.arange(20) == 5)).all()
    assert (features.flatten(1).isnan().any(1) == (torch.arange(20) == 5)).all()
    loss = network(tokens).square().sum()
    for gradient in torch.autograd.grad(loss, list(network.parameters())):
        assert gradient.isnan().any()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("head_width", WIDTHS)
@pytest.mark.parametrize("pooling", ["avg", "cls", "max"])
def test_a_huge_feature_is_as_in_float64(
    pooling: str, head_width: int, padded: bool
) -> None:
    """Its square overflows in float32, where some of torch's results are NaN."""
    network = make_network(pooling, head_width=head_width)
    tokens = make_tokens(network, 20, padded=padded)
    for row, size in ((2, -1e30), (5, 1e19), (18, 1e38)):
        tokens.features[row, 1, 2] = size
    exact = results(copy.deepcopy(network).double(), tokens, "torch")
    with use_kernels("native"):
        out = network(tokens)
        gradients = torch.autograd.grad(out.sum(), list(network.parameters()))
    bound = 1e-4 * exact[0].abs().amax(1, keepdim=True)
    assert ((out - exact[0]).abs() <= bound).all()
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("head_width", WIDTHS)
@pytest.mark.parametrize("part", ["to_query", "to_key", "to_value"])
def test_nan_weights_are_seen(part: str, head_width: int) -> None:
    network = make_network("max", head_width=head_width)
    with torch.no_grad():
        getattr(network.encoder.layers[0].attention, part).weight[0, 0] = math.nan
    for padded in (False, True):
        tokens = make_tokens(network, 20, padded=padded)
        empty = tokens.padding.all(1)
        with use_kernels("native"):
            assert torch.equal(network(tokens).isnan().all(1), ~empty)


@pytest.mark.parametrize("factor", [1e-6, 1e-4, 1e-2, 1e2, 1e4, 1e6])
def test_queries_and_keys_may_be_of_different_sizes(factor: float) -> None:
    network = make_network(num_tokens=12, std=0.5)
    with torch.no_grad():
        for layer in network.encoder.layers:
            layer.attention.to_query.weight *= factor
            layer.attention.to_key.weight /= factor
    tokens = make_tokens(network, 20, padded=True)
    exact = results(copy.deepcopy(network).double(), tokens, "torch")
    assert max(errors(results(network, tokens, "native"), exact)) < 1e-4


def test_dropout_is_that_of_the_gradient_and_keeps_the_mean() -> None:
    network = make_network(dropout=0.4, layers=1).double()
    tokens = make_tokens(network, 2)
    network.train()
    weight = network.encoder.layers[0].feedforward[2].bias
    direction = torch.linspace(-1, 1, len(weight), dtype=torch.float64)

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return network(tokens).square().sum()

    with use_kernels("native"):
        # The gradient belongs to the mask of the forward pass.
        (gradient,) = torch.autograd.grad(loss(0), weight)
        with torch.no_grad():
            weight += 1e-5 * direction
            above = loss(0)
            weight -= 2e-5 * direction
            below = loss(0)
            weight += 1e-5 * direction
        numeric = (above - below) / 2e-5
        assert float(gradient @ direction) == pytest.approx(float(numeric), rel=1e-6)
        assert loss(0) == loss(0) != loss(1)
        # The mean over masks of a linear function is that without dropout.
        samples = make_tokens(network, 1).map(lambda x: x.expand(4000, *x.shape[1:]))
        summed = make_network("sum", dropout=0.4, layers=1).double()
        torch.manual_seed(0)
        with torch.no_grad():
            noisy, clean = summed(samples), summed.eval()(samples)
    spread = noisy.std(0) / math.sqrt(len(noisy))
    assert (spread > 0).all()
    assert ((noisy.mean(0) - clean[0]).abs() < 5 * spread).all()


def test_a_gradient_of_the_gradient_with_dropout_is_rejected() -> None:
    network = make_network(dropout=0.5)
    loss = network.train()(make_tokens(network, 4)).sum()
    with pytest.raises(RuntimeError, match="kernels=torch"):
        torch.autograd.grad(loss, list(network.parameters()), create_graph=True)


def test_a_gradient_of_the_gradient_is_torchs() -> None:
    """With respect to the call's parameters, which are not the network's."""
    network = make_network(num_tokens=3, layers=1).double()
    tokens = make_tokens(network, 4, padded=True)
    assert_same_second_gradients(network, tokens)


@pytest.mark.parametrize("name", ["features", "types", "padding"])
def test_tokens_that_change_before_the_gradient_are_rejected(name: str) -> None:
    network = make_network()
    tokens = make_tokens(network, 4)
    loss = network(tokens).sum()
    getattr(tokens, name).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("unknown", [-1, 3])
def test_unknown_types_are_rejected(kernels: Kernels, unknown: int) -> None:
    network = make_network()
    tokens = make_tokens(network, 4, padded=True)
    tokens.types[tokens.padding] = 99
    tokens.types[2, 1], tokens.padding[2, 1] = unknown, False
    message = f"tokens: expected types from 0 to 2, got {unknown}$"
    with use_kernels(kernels), pytest.raises(InputError, match=message):
        network(tokens)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class OtherNetwork(SetNetwork):
    def encode(self, tokens: Tokens) -> tuple[Tensor, Tensor | None, Tensor]:
        x, padding, types = super().encode(tokens)
        return 2 * x, padding, types


def hook(path: str) -> Callable[[SetNetwork], Any]:
    def change(network: SetNetwork) -> None:
        module = network.get_submodule(path)
        module.register_forward_hook(lambda module, inputs, output: None)

    return change


def change_up(change: Callable[[nn.Linear], Any]) -> Callable[[SetNetwork], Any]:
    return lambda network: change(network.encoder.layers[0].feedforward[0])


def option(path: str, name: str, value: Any) -> Callable[[SetNetwork], Any]:
    return lambda network: setattr(network.get_submodule(path), name, value)


UNFIT: dict[str, Callable[[SetNetwork], Any]] = {
    "hook of a layer": hook("encoder.layers.1"),
    "hook of the network": hook(""),
    "subclass of a layer": lambda network: network.encoder.layers[
        0
    ].feedforward.__setitem__(0, Doubled(4, 13)),
    "subclass": lambda network: setattr(network, "__class__", OtherNetwork),
    "pruned": change_up(lambda up: prune.random_unstructured(up, "weight", 0.3)),
    "parametrized": change_up(
        lambda up: parametrize.register_parametrization(up, "weight", Twice())
    ),
    "without a bias": change_up(lambda up: setattr(up, "bias", None)),
    "other forward": change_up(
        lambda up: setattr(up, "forward", lambda x: 2 * x @ up.weight.T)
    ),
    "eps": option("encoder.layers.0.attention_norm", "eps", 0.1),
    "scale of a layer": option("encoder.layers.0.attention", "scale", 2.0),
    "dropout of attention": option("encoder.layers.0.attention", "dropout", 0.5),
    "approximate": option("encoder.layers.0.feedforward.1", "approximate", "tanh"),
    "activation": lambda network: network.encoder.layers[0].feedforward.__setitem__(
        1, nn.Tanh()
    ),
    "bfloat16": lambda network: network.bfloat16(),
}


@pytest.mark.parametrize("change", UNFIT)
def test_unsupported_networks_fall_back_to_torch(change: str) -> None:
    network = make_plain().eval()
    tokens = make_tokens(network, 4)
    assert is_used(network, tokens)
    UNFIT[change](network)
    assert not is_used(network, tokens)
    with use_kernels("torch"):
        expected = network(tokens)
    assert torch.equal(compile(network)(tokens), expected)


@pytest.mark.parametrize(
    "change",
    [
        option("pooling", "residual", False),
        option("pooling", "query", "mean"),
        option("pooling.attention", "scale", 2.0),
    ],
)
def test_options_of_the_head_are_those_at_compilation(
    change: Callable[[SetNetwork], Any],
) -> None:
    network = make_plain().double()
    tokens = make_tokens(network, 4)
    change(network)
    assert is_used(network, tokens)
    expected = results(network, tokens, "torch")
    assert max(errors(results(network, tokens, "native"), expected)) < 1e-9


def test_modes_of_torch_are_left_to_torch() -> None:
    network = make_network()
    tokens = make_tokens(network, 4)
    with use_kernels("torch"):
        assert not is_used(network, tokens)
    with torch.autocast("cpu"):
        assert not is_used(network, tokens)
    assert is_used(network, tokens)


def test_layers_with_different_dropout_are_left_to_torch() -> None:
    network = make_network(dropout=0.5).train()
    tokens = make_tokens(network, 4)
    assert is_used(network, tokens)
    network.encoder.layers[-1].eval()
    assert not is_used(network, tokens)


def test_training_mode_is_shared_with_the_original() -> None:
    plain = make_plain(token_dropout=0.5)
    network = compile(plain)
    tokens = make_tokens(plain, 40)
    plain.eval()
    assert not network.training
    assert torch.equal(network(tokens), network(tokens))
    network.train()
    assert plain.training
    assert plain.encoder.training
    assert not torch.equal(network(tokens), network(tokens))


def test_deepcopy_has_independent_weights() -> None:
    network = make_network()
    copied, tokens = copy.deepcopy(network), make_tokens(network, 4)
    expected = network(tokens)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    assert torch.equal(copied(tokens), expected)
    assert is_used(copied, tokens)


PARTS = [
    *("embedding.project.weight", "embedding.project.bias", "embedding.types.weight"),
    *("attention_norm.weight", "attention_norm.bias"),
    *(f"attention.to_{part}.weight" for part in ("query", "key", "value", "out")),
    *("feedforward_norm.weight", "feedforward_norm.bias"),
    *("feedforward.0.weight", "feedforward.0.bias"),
    *("feedforward.2.weight", "feedforward.2.bias"),
    *(f"pooling.attention.to_{part}.weight" for part in ("query", "key", "value")),
    *("pooling.attention.to_out.weight", "pooling.learned_query"),
]


def module_of(network: SetNetwork, part: str) -> tuple[nn.Module, str]:
    if not part.startswith(("embedding", "pooling")):
        part = f"encoder.layers.0.{part}"
    path, _, name = part.rpartition(".")
    return network.get_submodule(path), name


def outcome(network: SetNetwork, tokens: Tokens) -> list[Tensor] | str:
    """Return results and gradients, or torch's error."""
    try:
        return results(network, tokens, "auto")
    except (RuntimeError, InputError) as error:
        return str(error)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shrink", ["one", "short", "long", "scalar"])
def test_a_parameter_of_another_shape_is_left_to_torch(part: str, shrink: str) -> None:
    network = make_plain("ada, learned", num_tokens=5, type_embedding=4)
    tokens = make_tokens(network, 4)
    module, name = module_of(network, part)
    shape = getattr(module, name).shape
    changed = {
        "one": (1,) * len(shape),
        "short": (shape[0] - 1, *shape[1:]),
        "long": (shape[0] + 5, *shape[1:]),
        "scalar": (),
    }[shrink]
    setattr(module, name, nn.Parameter(torch.ones(changed)))
    # The kernel may still encode, if the changed one is the head's.
    assert is_used(network, tokens) == part.startswith("pooling")
    actual = outcome(network, tokens)
    with use_kernels("torch"):
        expected = outcome(network, tokens)
    if isinstance(expected, str):
        assert actual == expected
    else:
        assert not isinstance(actual, str)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("part", PARTS)
def test_a_parameter_that_shrinks_before_the_gradient_is_refused(part: str) -> None:
    """Autograd does not notice a replaced `data`, so the kernel's call checks it."""
    network = make_network("ada, learned", num_tokens=5, type_embedding=4)
    module, name = module_of(network, part)
    with use_kernels("native"):
        loss = network(make_tokens(network, 4)).sum()
        getattr(module, name).data = torch.ones(1)
        with pytest.raises(ValueError, match="compiled kernel: expected weights of"):
            loss.backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens: tokens._replace(types=tokens.types.float()),
        lambda tokens: tokens._replace(padding=tokens.padding.long()),
        lambda tokens: tokens._replace(padding=tokens.padding[:, :-1]),
    ],
    ids=["types", "padding", "shape"],
)
def test_tokens_of_another_kind_are_left_to_torch(
    change: Callable[[Tokens], Tokens],
) -> None:
    network = make_network()
    assert not is_used(network, change(make_tokens(network, 4)))


@pytest.mark.parametrize("kind", ["sparse", "subclass"])
def test_weights_whose_memory_is_elsewhere_are_left_to_torch(kind: str) -> None:
    class Wrapper(Tensor):
        pass

    network = make_plain()
    tokens = make_tokens(network, 4)
    layer = network.encoder.layers[0].feedforward[0]
    weight = layer.weight.detach()
    stand_in = weight.to_sparse() if kind == "sparse" else weight.as_subclass(Wrapper)
    layer._parameters["weight"] = nn.Parameter(stand_in, requires_grad=False)
    assert not is_used(network, tokens)


@pytest.mark.parametrize("pooling", ["ada", "avg", "pma"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_any_layout_are_torchs(layout: str, pooling: str) -> None:
    network = make_network(pooling).double()
    tokens = make_tokens(network, 20, padded=True)
    assert_same_gradients(network, tokens, LAYOUTS[layout])


def test_weights_follow_when_they_are_replaced() -> None:
    network, source = make_network(seed=1), make_network(seed=2)
    tokens = make_tokens(network, 4)
    network.original.load_state_dict(source.state_dict(), assign=True)
    with use_kernels("native"):
        assert torch.equal(network(tokens), source(tokens))
        assert torch.equal(copy.deepcopy(source)(tokens), source(tokens))


def test_native_without_a_kernel_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marl_pool.compiled.choice.library", lambda: None)
    with (
        pytest.raises(InputError, match=r"kernels.*auto or torch.*native"),
        use_kernels("native"),
    ):
        pytest.fail("entered the context")


def test_a_kernel_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_hash_sources", lambda: b"other")
    call.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="another version"):
            assert call.library() is None
    finally:
        call.library.cache_clear()


def test_a_head_in_torch_sees_cleared_types() -> None:
    """Under padding any type may stand, which a head that embeds types cannot take."""

    class Typed(Pooling):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.types = nn.Embedding(2, dim)

        def forward(self, x: Tensor, padding: Any = None, types: Any = None) -> Tensor:
            return (x + self.types(types)).masked_fill(padding[..., None], 0).sum(1)

    spec, encoder = (
        TokenSpec(3, 2, ("self", "other")),
        {"name": "transformer", "dim": 8},
    )
    plain = SetNetwork(spec, encoder=encoder, pooling={"name": "avg"})
    plain.pooling = Typed(plain.pooling.dim)
    compiled = compile(copy.deepcopy(plain))
    padding = torch.tensor([[False, False, True]] * 2)
    types = torch.tensor([[0, 1, -7]] * 2)
    tokens = Tokens(torch.randn(2, 3, 2), types, padding)
    assert compiled.computes(tokens, encoder=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), plain(tokens))
