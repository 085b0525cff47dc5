"""Weights out as safetensors, and optimizer state in from torch's own files."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from flashdist import FlashAdamW, checkpoint
from flashdist.checkpoint import CheckpointError, export_weights, import_optimizer
from tests.checkpoint.test_contents import Net, make, train

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_exported_weights_are_the_master_weights(tmp_path):
    model, opt = make(master_weight_bits=32)
    export_weights(tmp_path / "w.safetensors", model, opt)
    found = load_file(tmp_path / "w.safetensors")
    assert sorted(found) == ["body.bias", "body.weight", "embedding.weight", "seen"]
    for name, p in model.named_parameters():
        assert torch.equal(found[name], opt.master_weight(p))
        assert not torch.equal(found[name], p.float())
    assert found["seen"].dtype == torch.int64


def test_exported_in_bf16_they_are_the_models(tmp_path):
    model, opt = make()
    export_weights(tmp_path / "folder", model, opt, torch.bfloat16)
    found = load_file(tmp_path / "folder" / "model.safetensors")
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())


def test_a_large_export_is_divided_with_an_index(tmp_path):
    model, opt = make(model_class=lambda: Net(tied=False))
    export_weights(tmp_path / "hf", model, opt, max_file_bytes=6000)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    for name, file in index["weight_map"].items():
        found = load_file(tmp_path / "hf" / file)[name]
        tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
        assert torch.equal(found, opt.master_weight(tensor) if tensor.is_floating_point() else tensor)


def test_an_export_replaces_nothing_unless_asked_to(tmp_path):
    model, opt = make()
    export_weights(tmp_path / "w.safetensors", model, opt)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        export_weights(tmp_path / "w.safetensors", model, opt)
    export_weights(tmp_path / "w.safetensors", model, opt, overwrite=True)
    with pytest.raises(ValueError, match="dtype must be"):
        export_weights(tmp_path / "x.safetensors", model, opt, torch.int8)
    assert [p.name for p in tmp_path.iterdir()] == ["w.safetensors"]


def check_imported(model, reference, opt):
    """Moments follow torch's within the rounding of 8 bits, and the next step goes the same way."""
    dense = checkpoint.torch_state_dict(opt)["state"]
    for i, p in enumerate(model.parameters()):
        exact = reference.state[p]
        assert dense[i]["step"] == exact["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            assert (exact[key].float() - dense[i][key]).abs().max() <= 0.02 * exact[key].float().abs().max()
        assert torch.equal(opt.master_weight(p), p.detach().float())


@pytest.fixture
def trained():
    model, reference = make(opt_class=torch.optim.AdamW)
    return model, reference, FlashAdamW(model.parameters(), lr=0.5)


def test_import_from_state_dicts(trained):
    model, reference, opt = trained
    import_optimizer(reference.state_dict(), model, opt)
    check_imported(model, reference, opt)
    by_name = get_optimizer_state_dict(model, reference)
    opt = FlashAdamW(model.parameters(), lr=0.5)
    import_optimizer(by_name, model, opt)
    check_imported(model, reference, opt)
    assert opt.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: {"model": {}, "optimizer": s}, lambda s: {"optim": s}])
def test_import_from_a_file_of_torch_save(tmp_path, trained, wrap):
    model, reference, opt = trained
    torch.save(wrap(reference.state_dict()), tmp_path / "x.pt")
    import_optimizer(tmp_path / "x.pt", model, opt)
    check_imported(model, reference, opt)
    assert opt.param_groups[0]["lr"] == 1e-2


def test_import_from_a_folder_of_torch(tmp_path, trained):
    model, reference, opt = trained
    dcp.save({"app_state": {"optim": get_optimizer_state_dict(model, reference)}}, checkpoint_id=tmp_path / "dcp")
    train(model, opt, 1)
    import_optimizer(tmp_path / "dcp", model, opt)
    check_imported(model, reference, opt)
    assert opt.param_groups[0]["lr"] == 0.5


class Payload:
    def __reduce__(self):
        return exec, ("raise SystemError('executed')",)


def test_no_pickle_is_executed(tmp_path, trained):
    model, reference, opt = trained
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"state": Payload(), "param_groups": []}))
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_optimizer(tmp_path / "x.pt", model, opt)
    folder = tmp_path / "dcp"
    dcp.save({"optim": get_optimizer_state_dict(model, reference)}, checkpoint_id=folder)
    whole = (folder / ".metadata").read_bytes()
    for planted in (pickle.dumps(Payload()), whole[:-1] + pickle.dumps(Payload())[2:]):
        (folder / ".metadata").write_bytes(planted)
        with pytest.raises(CheckpointError, match=r"no place there|damaged"):
            import_optimizer(folder, model, opt)
    (folder / ".metadata").write_bytes(whole)
    # The entries that are no tensors are pickles too; the import must not read them.
    metadata = pickle.loads(whole)
    for index, place in metadata.storage_data.items():
        if "param_groups" in index.fqn:
            file = folder / place.relative_path
            data = bytearray(file.read_bytes())
            payload = pickle.dumps(Payload())
            data[place.offset : place.offset + len(payload)] = payload
            file.write_bytes(data)
    import_optimizer(folder, model, opt)


@pytest.mark.parametrize("content", [{}, {"model": 1}, [1, 2], {"state": {}}])
def test_files_without_an_optimizer_are_refused(tmp_path, trained, content):
    model, _, opt = trained
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="no optimizer's state dict"):
        import_optimizer(tmp_path / "x.pt", model, opt)


def test_import_refuses_other_models_and_missing_files(tmp_path, trained):
    model, reference, opt = trained
    with pytest.raises(CheckpointError, match="no file"):
        import_optimizer(tmp_path / "nowhere.pt", model, opt)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint of torch"):
        import_optimizer(tmp_path / "empty", model, opt)
    dcp.save({"optim": get_optimizer_state_dict(model, reference)}, checkpoint_id=tmp_path / "dcp")
    other, other_opt = make(1, model_class=lambda: torch.nn.Sequential(torch.nn.Linear(3, 40)))
    before = {key: t.clone() for key, t in other_opt.state[other[0].weight].items()}
    with pytest.raises(ValueError, match="no optimizer state of the model's parameters"):
        import_optimizer(tmp_path / "dcp", other, other_opt)
    assert all(torch.equal(t, other_opt.state[other[0].weight][key]) for key, t in before.items())
