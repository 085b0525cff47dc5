"""Gradient release on one device: the bits of an ordinary step, no gradients left, and clear refusals."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.clip_grad as clip_grad
from torch import nn
from torch.utils.checkpoint import checkpoint

from flashdist import FlashAdamW, FlashLion, FlashSGD, enable_gradient_release
from tests.conftest import BACKENDS
from tests.support.backends import assert_same, assert_unchanged, snapshot

VOCAB, WIDTH, LAYERS = 40, 64, 3


class Net(nn.Module):
    """Embedding, layers with norms, a head that may be the embedding; layers may be left out of a forward."""

    def __init__(self, tied: bool = False, checkpointing: str = "", width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.checkpointing = checkpointing

    def layer(self, i, x):
        return x + torch.tanh(self.layers[i](self.norms[i](x)))

    def forward(self, tokens, leave_out=()):
        x = self.embedding(tokens)
        for i in range(len(self.layers)):
            if i in leave_out:
                continue
            if self.checkpointing:
                x = checkpoint(self.layer, i, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = self.layer(i, x)
        return self.head(x)


def loss_of(model, seed, **arguments):
    tokens = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(seed))
    logits = model(tokens[:, :-1], **arguments)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def pair(build=Net, cls=FlashAdamW, backend="eager", release=None, **arguments):
    """A model stepped with release and its twin without: (model, opt, handle), (model, opt)."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, **arguments}
    made = []
    for _ in range(2):
        model = build().bfloat16()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        made.append((model, BACKENDS[backend].build(cls, groups, **settings)))
    (model, opt), plain = made
    return (model, opt, enable_gradient_release(model, opt, **(release or {}))), plain


def run(released, plain, steps=3, **arguments):
    """Train both; the released one must have no gradients after backward."""
    for t in range(steps):
        loss_of(released[0], t, **arguments).backward()
        assert all(p.grad is None for p in released[0].parameters())
        released[1].step()
        loss_of(plain[0], t, **arguments).backward()
        plain[1].step()
        plain[1].zero_grad()


def tiny():
    """For the kernels in Triton's interpreter."""
    return Net(width=32, layers=1)


@pytest.mark.parametrize("batch_elements", [1, 5000, 1 << 25])
def test_bits_of_an_ordinary_step(batch_elements):
    released, plain = pair(release={"batch_elements": batch_elements})
    run(released, plain)
    assert_same(released[1], plain[1])


def test_bits_of_an_ordinary_step_of_the_kernels():
    released, plain = pair(tiny, backend="triton", release={"batch_elements": 1500})
    run(released, plain, steps=2)
    assert_same(released[1], plain[1])
    plans = released[1]._backends[BACKENDS["triton"].device.type]._plans
    assert len(plans) == 3, "one plan for each batch, kept from step to step"


@pytest.mark.parametrize(
    ("cls", "arguments"), [(FlashLion, {}), (FlashSGD, {"momentum": 0.9}), (FlashAdamW, {"master_weight_bits": 32})]
)
def test_other_rules_and_formats(cls, arguments):
    released, plain = pair(cls=cls, release={"batch_elements": 3000}, **arguments)
    run(released, plain)
    assert_same(released[1], plain[1])


@pytest.mark.parametrize("checkpointing", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize("tied", [False, True])
def test_tied_weights_and_checkpointing(tied, checkpointing):
    released, plain = pair(lambda: Net(tied, checkpointing), release={"batch_elements": 1})
    if checkpointing == "reentrant":  # needs an input that takes gradients
        for model in (released[0], plain[0]):
            model.embedding.register_forward_hook(lambda module, args, out: out.requires_grad_())
    run(released, plain)
    assert_same(released[1], plain[1])
    assert {int(s["step"]) for s in released[1].state.values()} == {3}


def test_compiled_model():
    released, plain = pair(release={"batch_elements": 5000})
    compiled = torch.compile(released[0], backend="aot_eager"), *released[1:]
    run(compiled, plain, steps=2)
    assert_same(released[1], plain[1])


def test_gradients_alive_together_are_bounded():
    batch = WIDTH * WIDTH + 1
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watch(p, grad):
        nonlocal most
        alive.append(weakref.ref(grad))
        most = max(most, sum(g.numel() for r in alive if (g := r()) is not None))

    (model, _opt, _), _ = pair(release={"batch_elements": batch, "pre_step": watch})
    loss_of(model, 0).backward()
    assert not any(r() is not None for r in alive)
    assert len(alive) == len(list(model.parameters()))
    # What waits is less than a batch, and the vectors; the largest gradient comes on top, and one more on its way.
    vectors = sum(p.numel() for p in model.parameters() if p.dim() == 1)
    assert most < batch + vectors + VOCAB * WIDTH + WIDTH * WIDTH < sum(p.numel() for p in model.parameters())


def test_layers_that_come_and_go():
    released, plain = pair(release={"batch_elements": 5000})
    for leave_out in [(), (1,), (0, 2), (), (2,), ()]:
        run(released, plain, steps=1, leave_out=leave_out)
    assert_same(released[1], plain[1])
    assert {int(s["step"]) for s in released[1].state.values()} == {6, 5, 4}


def test_frozen_and_thawed_parameters():
    released, plain = pair(release=None)
    for freeze in (True, False):
        for model in (released[0], plain[0]):
            model.layers[1].requires_grad_(not freeze)
        run(released, plain, steps=2)
    assert_same(released[1], plain[1])


def test_parameters_that_are_frozen_when_release_is_enabled():
    model = Net().bfloat16()
    model.layers[0].requires_grad_(False)
    opt = FlashAdamW(model.parameters())
    enable_gradient_release(model, opt)
    assert not model.layers[0].weight.requires_grad
    loss_of(model, 0).backward()
    opt.step()
    model.layers[0].requires_grad_(True)
    loss_of(model, 1).backward()
    opt.step()
    assert int(opt.state[model.layers[0].weight]["step"]) == 1
    assert model.layers[0].weight.grad is None


def test_schedulers_closures_and_zero_grad():
    released, plain = pair()
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)) for o in (released[1], plain[1])]
    for t in range(3):
        for model, opt in (released[:2], plain):

            def closure(model=model, opt=opt, t=t):
                opt.zero_grad()
                loss = loss_of(model, t)
                loss.backward()
                return loss

            assert float(opt.step(closure).detach()) > 0
        for scheduler in schedulers:
            scheduler.step()
    assert released[1].param_groups[0]["lr"] == pytest.approx(1e-2 / 4)
    assert_same(released[1], plain[1])


def test_release_and_ordinary_steps_alternate():
    """State tensors that were put in place of others are seen by both."""
    (model, opt, handle), plain = pair(release={"batch_elements": 5000})
    run((model, opt), plain, steps=2)
    handle.remove()
    assert not handle.active
    for t in range(3):
        loss_of(model, t).backward()
        assert all(p.grad is not None for p in model.parameters())
        opt.step()
        opt.zero_grad()
        loss_of(plain[0], t).backward()
        plain[1].step()
        plain[1].zero_grad()
        for m, o in ((model, opt), plain):
            state = o.state[m.head.weight]
            state["exp_avg"] = state["exp_avg"].clone().zero_()
        with enable_gradient_release(model, opt, batch_elements=5000):
            run((model, opt), plain, steps=1)
    assert_same(opt, plain[1])


# What may change a step.


def test_pre_step_vetoes_and_scales():
    def pre_step(p, grad):
        if p.dim() == 1:
            return False
        if p.shape[0] == VOCAB:
            return torch.tensor(0.5)
        grad.mul_(2)
        return None

    released, plain = pair(release={"pre_step": pre_step})
    before = [p.detach().clone() for p in released[0].parameters() if p.dim() == 1]
    loss_of(released[0], 0).backward()
    released[1].step()
    assert all(p.grad is None for p in released[0].parameters())
    loss_of(plain[0], 0).backward()
    for p in plain[0].parameters():
        if p.dim() == 1:
            p.grad = None
        else:
            p.grad.mul_(0.5 if p.shape[0] == VOCAB else 2)
    plain[1].step()
    assert_same(released[1], plain[1])
    vectors = [p for p in released[0].parameters() if p.dim() == 1]
    assert all(torch.equal(a, b) for a, b in zip(before, vectors, strict=True))
    assert not any(p in released[1].state for p in vectors)


def test_pre_step_may_not_return_anything():
    (model, _opt, _), _ = pair(release={"pre_step": lambda p, grad: "no"})
    with pytest.raises(TypeError, match="pre_step must return"):
        loss_of(model, 0).backward()


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_clipping_by_the_previous_norm(name):
    build, batch = (Net, 3000) if name == "eager" else (tiny, 1500)
    release = {"clip": "previous_norm", "max_norm": 0.5, "batch_elements": batch}
    released, plain = pair(build, backend=name, release=release)
    model, opt, handle = released
    previous = measured = None
    for t in range(4 if name == "eager" else 2):
        loss_of(model, t).backward()
        opt.step()
        loss_of(plain[0], t).backward()
        grads = [p.grad.float() for p in plain[0].parameters()]
        norm = torch.stack([g.norm() for g in grads]).norm()
        assert handle.last_norm == pytest.approx(float(norm), rel=1e-5)
        if previous is not None:
            assert previous > 0.5, "the case must clip"
            plain[1]._clip_factor = torch.clamp(0.5 / (measured + 1e-6), max=1.0)
        plain[1].step()
        plain[1].zero_grad()
        previous, measured = norm, handle.last_norm
    assert_same(opt, plain[1])


@pytest.mark.parametrize("name", ["eager", "triton"])
def test_a_measured_first_step_is_clipped_by_its_own_norm(name):
    build, batch = (Net, 3000) if name == "eager" else (tiny, 1500)
    release = {"clip": "previous_norm", "max_norm": 0.5, "batch_elements": batch}
    (model, opt, handle), plain = pair(build, backend=name, release=release)
    with handle.measure():
        loss_of(model, 0).backward()
        opt.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert not opt.state
    loss_of(plain[0], 0).backward()
    norm = plain[1].clip_grad_norm_(0.5)
    assert norm > 0.5, "the case must clip"
    assert handle.last_norm == pytest.approx(float(norm), rel=1e-6)
    loss_of(model, 0).backward()
    plain[1]._clip_factor = torch.clamp(0.5 / (handle.last_norm + 1e-6), max=1.0)
    for one in (opt, plain[1]):
        one.step()
    assert_same(opt, plain[1])


def test_measuring_where_it_makes_no_sense_is_an_error():
    (model, opt, handle), _ = pair(release={"clip": "previous_norm", "max_norm": 0.5})
    with pytest.raises(RuntimeError, match="no backward finished"), handle.measure():
        pass
    with handle.measure():
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match=r"opt\.step\(\) inside measure"):
            opt.step()
    with pytest.raises(ZeroDivisionError), handle.measure():
        1 / 0  # noqa: B018
    assert handle.last_norm > 0
    assert not opt.state
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="begins before a backward"), handle.measure():
        pass
    opt.step()
    (_, _, handle), _ = pair(release={})
    with pytest.raises(RuntimeError, match=r"belongs to clip"), handle.measure():
        pass


# What cannot be right is refused.


def test_second_backward_before_step_is_an_error_and_steps_nothing():
    (model, opt, _), _ = pair()
    loss_of(model, 0).backward()
    before = snapshot(opt)
    with pytest.raises(RuntimeError, match=r"head\.weight got a second gradient before opt\.step"):
        loss_of(model, 1).backward()
    assert_unchanged(opt, before)


def test_zero_grad_cannot_undo_a_finished_backward():
    (model, opt, _), _ = pair()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"has applied them"):
        opt.zero_grad()
    opt.step()
    opt.zero_grad()


def test_an_exception_in_backward():
    released, plain = pair(release={"batch_elements": 3000})
    model, opt, _ = released

    def fail(grad):
        raise ValueError("in the middle")

    hook = model.norms[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        loss_of(model, 0).backward()
    hook.remove()
    with pytest.raises(RuntimeError, match="did not finish"):
        opt.step()
    with pytest.raises(RuntimeError, match=r"call opt\.zero_grad\(\) first"):
        loss_of(model, 0).backward()
    opt.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    for p, q in zip(plain[0].parameters(), model.parameters(), strict=True):
        p.data.copy_(q.data)
    plain[1].load_state_dict(opt.state_dict())
    run(released, plain)
    assert_same(opt, plain[1])


def test_clipping_is_refused_while_released_only():
    original = clip_grad._clip_grads_with_norm_
    (model, opt, handle), (other, other_opt) = pair()
    loss_of(model, 0).backward()
    loss_of(other, 0).backward()
    with pytest.raises(RuntimeError, match="previous_norm"):
        opt.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="previous_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert float(nn.utils.clip_grad_norm_(other.parameters(), 1.0)) > 0
    opt.step()
    other.zero_grad()
    with enable_gradient_release(other, other_opt):
        pass
    with pytest.raises(RuntimeError, match="previous_norm"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    handle.remove()
    handle.remove()
    assert clip_grad._clip_grads_with_norm_ is original
    opt.clip_grad_norm_(1.0)


def test_grad_scaler_is_refused():
    (model, opt, _), _ = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="GradScaler"):
        scaler.step(opt)


def test_gradients_that_appear_beside_the_release():
    (model, opt, _), _ = pair()
    loss_of(model, 0).backward()
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    with pytest.raises(RuntimeError, match=r"head\.weight has a gradient although"):
        opt.step()


def test_a_parameter_that_was_added_later():
    (model, opt, _), _ = pair()
    extra = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt.add_param_group({"params": [extra]})
    (loss_of(model, 0) + extra.sum()).backward()
    with pytest.raises(RuntimeError, match="added after"):
        opt.step()


def test_a_graph_that_still_needs_the_old_weight():
    """The second use gives the weight no gradient, so nothing tells that it is still to be read."""
    (model, _opt, _), _ = pair(release={"batch_elements": 1})
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
    inner = nn.Parameter(torch.randn(4, WIDTH, dtype=torch.bfloat16))
    late = (inner * 2) @ model.head.weight.detach().t()
    loss = (x @ model.head.weight.t()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


def test_sparse_gradients_and_double_backward():
    model = nn.Embedding(VOCAB, WIDTH, sparse=True).bfloat16()
    enable_gradient_release(model, FlashAdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="sparse gradient"):
        model(torch.tensor([1])).sum().backward()
    (net, _opt, _), _ = pair()
    with pytest.warns(UserWarning, match="create_graph"), pytest.raises(RuntimeError, match="create_graph=True"):
        loss_of(net, 0).backward(create_graph=True)


def test_arguments():
    model = Net().bfloat16()
    opt = FlashAdamW(model.parameters())
    for arguments, message in [
        ({"clip": "norm"}, "clip must be None"),
        ({"clip": "previous_norm"}, "belong together"),
        ({"max_norm": 1.0}, "belong together"),
        ({"clip": "previous_norm", "max_norm": -1.0}, "above 0"),
        ({"batch_elements": 0}, "batch_elements"),
    ]:
        with pytest.raises(ValueError, match=message):
            enable_gradient_release(model, opt, **arguments)
    with pytest.raises(TypeError, match="flashdist's optimizers"):
        enable_gradient_release(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="not a parameter of this model"):
        enable_gradient_release(model.head, opt)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"embedding\.weight has a gradient"):
        enable_gradient_release(model, opt)
    opt.zero_grad()
    with enable_gradient_release(model, opt), pytest.raises(RuntimeError, match="enabled for this optimizer already"):
        enable_gradient_release(model, opt)
    assert opt._release is None


def test_release_ends_with_the_optimizer():
    model = Net().bfloat16()
    handle = weakref.ref(enable_gradient_release(model, FlashAdamW(model.parameters())))
    import gc

    gc.collect()
    assert handle() is None
    loss_of(model, 0).backward()
    assert all(p.grad is not None for p in model.parameters())
