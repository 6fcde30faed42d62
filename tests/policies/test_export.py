"""Exported policies act like the originals, or the export is refused."""

import resource
from dataclasses import replace

import pytest
import torch

from helpers.samples import SPEC
from marl_pool import make_policy, pooling_names
from marl_pool.policies import make_agent
from marl_pool.policies.action_spaces import Selection
from marl_pool.policies.actions import ActionSpec
from marl_pool.policies.export import ActionNetwork, export_policy
from marl_pool.utils.errors import InputError

BOX, CHOICES = ActionSpec(low=(0.0, -2.0), high=(1.0, 2.0)), ActionSpec(n=3)
RECURRENT = ("attention_neuron", "vision_neuron")


def policy(pooling, actions=BOX, num_layers=2):
    encoder = {"name": "transformer", "num_layers": num_layers}
    return make_policy(SPEC, actions, encoder=encoder, pooling=pooling, seed=0)


def test_torch_loads_what_was_exported(tmp_path):
    file = tmp_path / "new.pt2"
    assert export_policy(policy("ada", CHOICES), file, "torch") == 0
    module = torch.export.load(file).module()
    sizes = (5, SPEC.num_tokens)
    types, padding = torch.zeros(sizes).long(), torch.zeros(sizes).bool()
    actions = module(torch.zeros(*sizes, SPEC.num_features), types, padding)
    assert actions.shape == (5,)
    assert actions.dtype == torch.int64
    with pytest.raises(InputError, match="new.pt2 exists; choose another --out"):
        export_policy(policy("max"), file, "torch")


def test_a_folder_that_cannot_be_written_is_refused_before_the_export(
    tmp_path, monkeypatch
):
    def refuse(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("marl_pool.policies.export.NamedTemporaryFile", refuse)
    monkeypatch.setattr("marl_pool.policies.export.ActionNetwork", None)
    with pytest.raises(InputError, match=r"new\.pt2 cannot be written: Permission"):
        export_policy(policy("ada"), tmp_path / "new.pt2", "torch")


@pytest.mark.parametrize("rows", [1, 7])
def test_an_agent_without_a_memory_takes_any_batch(tmp_path, rows):
    agent = make_agent(SPEC, BOX, "feed_forward", seed=0)
    assert export_policy(agent, tmp_path / "new.pt2", "torch") == 0
    module = torch.export.load(tmp_path / "new.pt2").module()
    types, padding = torch.zeros(2, rows, SPEC.num_tokens).long()
    inputs = torch.randn(rows, SPEC.num_tokens, SPEC.num_features), types, padding > 0
    expected = ActionNetwork(agent)(*inputs)
    torch.testing.assert_close(module(*inputs), expected)


@pytest.mark.parametrize(
    ("pooling", "is_free"),
    [
        ("ada", True),
        ("flatten", False),
        pytest.param("cls", True, marks=pytest.mark.slow),
        pytest.param("merge", False, marks=pytest.mark.slow),
    ],
)
def test_the_number_of_tokens_is_free_where_the_head_allows_it(
    tmp_path, pooling, is_free
):
    exported = policy(pooling, num_layers=1)
    export_policy(exported, tmp_path / "new.pt2", "torch")
    module = torch.export.load(tmp_path / "new.pt2").module()
    for count in (1, 4, 9):
        features = torch.randn(2, count, SPEC.num_features)
        types, padding = torch.zeros(2, 2, count).long()
        if not is_free:
            with pytest.raises((AssertionError, RuntimeError)):
                module(features, types, padding.bool())
            continue
        output = module(features, types, padding.bool())
        expected = ActionNetwork(exported)(features, types, padding.bool())
        torch.testing.assert_close(output, expected)


def test_a_mask_of_selected_tokens_grows_with_them(tmp_path):
    choices = Selection(2, SPEC.num_tokens, ("friend", "noise"))
    exported = make_policy(SPEC, choices, encoder="identity", action="select", seed=0)
    export_policy(exported, tmp_path / "new.pt2", "torch", masked=True)
    module = torch.export.load(tmp_path / "new.pt2").module()
    for count in (1, 4, 9):
        features = torch.randn(8, count, SPEC.num_features)
        types, padding = torch.ones(8, count).long(), torch.zeros(8, count).bool()
        mask = torch.rand(8, 2 + count) < 0.5
        output = module(features, types, padding, mask)
        expected = ActionNetwork(exported)(features, types, padding, mask)
        assert torch.equal(output, expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # onnxscript's and torch's own
@pytest.mark.parametrize(
    ("pooling", "masked", "axes"),
    [
        ("max", False, ["batch", "tokens"]),
        ("max", True, ["batch", "tokens"]),
        ("flatten", False, ["batch", SPEC.num_tokens]),
    ],
)
def test_axes_of_onnx_have_names(tmp_path, pooling, masked, axes):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    file = tmp_path / "new.onnx"
    exported = policy(pooling, CHOICES if masked else BOX, num_layers=1)
    export_policy(exported, file, "onnx", masked=masked)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    shapes = {part.name: part.shape for part in session.get_inputs()}
    assert shapes["features"] == [*axes, SPEC.num_features]
    assert shapes["types"] == shapes["padding"] == axes
    assert shapes.get("action_mask") == (["batch", 3] if masked else None)
    (action,) = session.get_outputs()
    assert action.shape[0] == "batch"


def test_a_parent_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"new\.onnx cannot be written: Not a dir"):
        export_policy(policy("max"), tmp_path / "file" / "new.onnx", "onnx")


def test_a_full_disk_is_an_error(tmp_path):
    # Emulates a disk with one block left, on which torch's writer would abort.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="too large") as caught:
            export_policy(policy("max", num_layers=1), tmp_path / "new.pt2", "torch")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(tmp_path / "new.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("pooling", sorted({*pooling_names()} - {*RECURRENT}))
def test_every_head_without_a_memory_is_exported(tmp_path, pooling):
    shallow = policy(pooling, num_layers=1)
    assert export_policy(shallow, tmp_path / "new.pt2", "torch") < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # onnxscript's and torch's own
@pytest.mark.parametrize("pooling", ["ada", "max", "cls"])
def test_onnx_runs_what_was_exported(tmp_path, pooling):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    assert export_policy(policy(pooling), tmp_path / "new.onnx", "onnx") < 1e-4


@pytest.mark.parametrize("pooling", RECURRENT)
def test_a_policy_with_a_memory_is_refused(tmp_path, pooling):
    with pytest.raises(InputError, match="expected a policy without a memory, got one"):
        export_policy(policy(pooling), tmp_path / "new.onnx", "onnx")
    assert not list(tmp_path.iterdir())


def test_a_policy_on_bytes_takes_bytes(tmp_path):
    spec = replace(SPEC, dtype="uint8")
    original = make_policy(spec, BOX, pooling="max", seed=0).train()
    file = tmp_path / "new.pt2"
    export_policy(original, file, "torch")
    assert original.training
    module, sizes = torch.export.load(file).module(), (5, SPEC.num_tokens)
    types, padding = torch.zeros(sizes).long(), torch.zeros(sizes).bool()
    features = torch.randint(256, (*sizes, SPEC.num_features), dtype=torch.uint8)
    expected = ActionNetwork(original.eval())(features, types, padding)
    torch.testing.assert_close(module(features, types, padding), expected)
