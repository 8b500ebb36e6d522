"""Ways in which tokens of a route might be read, cut or trusted without a word: each is exact, or an error."""

import copy
import warnings

import pytest
import timm
import torch
from oracle import BATCH, N, assert_close, gradients, randn, refused
from small_networks import TABLE, D, Plain, Rotary, X, made
from test_situations import attention, masked, rotary
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from routed import Route, routed
from routed.modules import backward_id

MIDDLE, NAMED, COMPUTES = [Route(1, 2, 0.5)], dict(blocks="blocks", along={"rope": 0}), "computes with the others"
NOISE = torch.rand(BATCH, 1, N)


def test_torch_still_has_the_name_without_a_public_one():
    seen, x = [], torch.ones(2, requires_grad=True)
    (x * 2).register_hook(lambda _: seen.append(backward_id()))
    y = x * 2
    y.register_hook(lambda _: seen.append(backward_id()))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert backward_id() == -1 < seen[0] != seen[1] and len(seen) == 2


@pytest.mark.parametrize("frozen_blocks", [0, 2])
def test_a_step_after_a_backward_that_ends_inside_the_network_is_as_if_it_were_the_first(frozen_blocks):
    net = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=16, num_heads=2, depth=4, num_classes=0)
    x = randn(2, 3, 64, 64)
    for p in (*net.patch_embed.parameters(), net.pos_embed, net.cls_token, *net.blocks[:frozen_blocks].parameters()):
        p.requires_grad_(False)
    dense = net.forward_features(x)
    for routes in (MIDDLE, MIDDLE, []):
        with routed(net, routes) as routing:
            out = net.forward_features(x)
            loss = out.square().mean()
        torch.autograd.grad(loss, net.blocks[3].mlp.fc1.weight, retain_graph=True)      # as VQGAN's adaptive weight
        loss.backward()
        assert torch.equal(out, dense) == (not routes) and len(routing.ids_keep) == len(routes)


def test_a_checkpoint_around_the_loss_is_refused_as_its_pass_is_not_known():
    net = Plain()

    def step():
        checkpoint(lambda x: net(x).exp().mean().sqrt(), X, use_reentrant=False, preserve_rng_state=False).backward()

    assert "put the checkpoint around the network or its blocks" in refused(net, MIDDLE, step, **NAMED)


def test_dense_and_routed_passes_share_a_backward_although_the_first_blocks_are_frozen():
    def trained(checkpointed):
        net = Plain(checkpointed)
        net.blocks[:2].requires_grad_(False)
        loss = net(X).sum()
        with routed(net, MIDDLE, mask_noise=NOISE, **NAMED):
            loss = loss + net(X).square().sum()
            with routed(net, [], **NAMED):
                loss = loss + net(X + 1).square().sum()
        loss.backward()
        return gradients(net)

    assert_close(trained(True), trained(False))


def test_a_parametrization_that_is_put_on_a_block_while_a_loss_lives_stays():
    net = Plain()
    with routed(net, MIDDLE, **NAMED):
        loss = net(X).sum()
    net.blocks[1].gain = nn.Parameter(torch.ones(D))
    parametrize.register_parametrization(net.blocks[1], "gain", nn.Softplus(), unsafe=True)
    del loss
    for same in (net, copy.deepcopy(net)):
        with routed(same, MIDDLE, **NAMED):
            same(X)
        assert parametrize.is_parametrized(same.blocks[1], "gain") and (same.blocks[1].gain > 1).all()


# ---- hooks and wrappers ---------------------------------------------------------------------------------------------


def with_hook(kind, hook, **options):
    net, seen = Plain(), []
    getattr(net.blocks[2], f"register_{kind}_hook")(lambda *args: hook(seen, *args), **options)
    return net, seen


@pytest.mark.parametrize("read", [lambda x: x.mean(), lambda x: x.detach().numpy(), lambda x: x.tolist(),
                                  lambda x: torch.stack([x, x]), lambda x: torch.equal(x, x), lambda x: x.add_(1)])
@pytest.mark.parametrize(("kind", "hook"), [("forward", lambda seen, _, args, out: seen.append(out)),
                                            ("forward_pre", lambda seen, _, args: seen.append(args[0]))])
def test_tokens_of_a_route_that_a_hook_stores_cannot_be_computed_with(kind, hook, read):
    net, seen = with_hook(kind, hook)
    with routed(net, [Route(1, 3, 0.5)], **NAMED), torch.no_grad():
        net(X)
        assert seen[-1].shape == (1, N // 2, D) and seen[-1].dtype == X.dtype
    with pytest.raises(ValueError, match=COMPUTES):
        read(seen[-1])


def test_hooks_on_gradients_pass_and_hooks_that_add_positions_do_not():
    net, seen = with_hook("full_backward", lambda seen, _, grads, outs: seen.append(outs[0].shape))
    with routed(net, MIDDLE, mask_noise=NOISE, **NAMED):
        net(X).square().sum().backward()
    plain = Plain()
    with routed(plain, MIDDLE, mask_noise=NOISE, **NAMED):
        plain(X).square().sum().backward()
    assert_close(gradients(net), gradients(plain))
    assert seen
    net, _ = with_hook("forward", lambda seen, _, args, out: out + TABLE[:out.shape[1]].repeat(1, 2))
    assert COMPUTES in refused(net, MIDDLE, lambda: net(X), **NAMED)
    net = made(lambda self, x, rope=None: self.attend(x, lambda q: q * (1 if rope is None else rope))).model
    net.blocks[1].register_forward_pre_hook(lambda _, args: (args[0], TABLE[:args[0].shape[1]]))
    assert "block 1 of blocks depends on where" in refused(net, MIDDLE, lambda: net(X), blocks="blocks")


DETACHED = type("Detached", (torch.autograd.Function,), dict(       # as in the hooks of DeepSpeed's ZeRO-3
    forward=staticmethod(lambda ctx, x: x.detach()), backward=staticmethod(lambda ctx, gradient: gradient)))


class Recomputed(Rotary):
    """As a block of transformers, which puts a reentrant checkpoint around itself."""

    def __call__(self, *args):
        return checkpoint(super().__call__, *args, use_reentrant=True)


@pytest.mark.parametrize("around", [
    lambda part: part.register_forward_hook(lambda _, args, out: DETACHED.apply(out)),
    lambda part: setattr(part, "__class__", Recomputed)], ids=["a hook", "a reentrant checkpoint"])
def test_blocks_train_behind_functions_that_detach_their_tokens(around):
    def trained(around):
        net = Plain()
        [around(part) for part in net.blocks]
        with routed(net, MIDDLE, mask_noise=NOISE, **NAMED):
            net(X.clone().requires_grad_()).square().sum().backward()
        return gradients(net)

    assert_close(trained(around), trained(lambda part: None))


# ---- what a trial compares, and when --------------------------------------------------------------------------------


def later(block, change, call):
    """What is said about a network that becomes wrong after a pass in which it was right; without trials nothing is."""
    net = made(block, call).model
    with routed(net, MIDDLE, blocks="blocks"):
        net(X)
    said = refused(net, MIDDLE, lambda: change(net), blocks="blocks")
    with routed(net, MIDDLE, blocks="blocks", probe=False):
        change(net)
    return said


def put(name, value, blocks=slice(None)):
    return lambda net: [setattr(part, name, value) for part in net.blocks[blocks]] and net(X)


def window(self, x):
    places = torch.arange(x.shape[1])
    return masked(self, x, ((places[:, None] - places).abs() < 12)[None, None])


def shifted(part, x):
    return part(x + 1 if hasattr(part, "shifts") else x)


POSITIONS = "depends on where its tokens are"


@pytest.mark.parametrize(("block", "change", "says"), [
    (lambda self, x: getattr(self, "processor", attention)(self, x), put("processor", rotary), POSITIONS),
    (lambda self, x: rotary(self, x) if getattr(self, "turns", False) else attention(self, x), put("turns", True),
     POSITIONS),
    (window, lambda net: net(randn(BATCH, 30, D)), POSITIONS),      # of the same order of magnitude as N
    (lambda self, x: attention(self, x) if self.training else rotary(self, x), lambda net: net.eval()(X), POSITIONS),
    (lambda self, x: attention(self, x) if len(x) > 2 else rotary(self, x), lambda net: net(X[:1]), POSITIONS),
    (attention, put("shifts", 1, slice(2, 3)), COMPUTES), (attention, put("shifts", 1, slice(3, 4)), "changes the")])
def test_what_was_right_in_an_earlier_pass_is_checked_again(block, change, says):
    assert says in later(block, change, shifted)


def stores(self, x, rope, shared):
    self.loss = self.qkv(x).softmax(-1).mean((0, 1)).square().sum()
    return self.attend(x, lambda q: q * rope)


@pytest.mark.parametrize(("block", "shared"), [
    (lambda self, x, rope, shared: self.attend(x, lambda q: q * rope) * shared.sum(), torch.rand(6, 1, 1)),
    (lambda self, x, rope, shared: self.attend(x - x.mean((0, 1)), lambda q: q * rope), None),
    (stores, None)], ids=["a shared argument", "a mean of the batch", "a stored loss"])
def test_what_axis_0_cuts_by_samples_is_compared_with_one_call_for_all(block, shared):
    net = made(block, lambda part, x: part(x, TABLE, shared)).model
    if shared is not None:
        with routed(net, MIDDLE, **NAMED):
            net(randn(7, N, D))             # of which it is no batch yet
    said = refused(net, MIDDLE, lambda: net(randn(6, N, D)), **NAMED)
    assert "is called once for each sample, because along= names axis 0" in said and "ordered" not in said


def test_noise_of_a_block_is_not_taken_for_positions_and_does_not_hide_them():
    def noisy(block):
        return lambda self, x: block(self, x * (1 + 0.1 * torch.rand_like(x)) if self.training else x)

    net = made(noisy(attention)).model.train()
    with routed(net, MIDDLE, blocks="blocks") as routing:
        net(X)
    assert len(routing.trials) == 2
    net = made(noisy(rotary)).model.train()
    assert "depends on where" in refused(net, MIDDLE, lambda: net(X), blocks="blocks")


@pytest.mark.parametrize("how", ["torch.compile(net)", "net.compile()", "elsewhere"])
def test_blocks_of_a_compiled_network_are_tried_uncompiled_or_a_warning_says_that_they_are_not(how):
    torch._dynamo.reset()
    net = made(rotary).model
    fast = torch.compile(net, backend="eager") if how != "net.compile()" else net
    if fast is net:
        net.compile(backend="eager")
    if how != "elsewhere":
        assert "depends on where" in refused(fast, MIDDLE, lambda: fast(X), blocks="blocks")
        return
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            with routed(net, MIDDLE, blocks="blocks"):
                fast(X)
    assert {str(row.message).partition(", so")[0] for row in warned} == {"Somebodys is compiled"}


def test_a_change_between_blocks_is_found_while_a_network_is_compiled():
    torch._dynamo.reset()
    net = made(attention, lambda part, x: part(x + 1)).model
    fast = torch.compile(net, backend="eager")
    assert "changes the tokens" in refused(net, MIDDLE, lambda: fast(X), blocks="blocks")
