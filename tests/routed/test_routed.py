"""`routed` takes other people's networks on a route, exactly: forward, gradient, and whatever torch does with them."""

import copy
import gc
import weakref
from functools import partial
from pathlib import Path

import diffusers
import pytest
import torch
from foreign_networks import (
    BATCH,
    NETWORKS,
    TEXT,
    N,
    assert_close,
    example,
    family,
    gradients,
    noise_for,
    refused,
    wrapped,
)
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dit import DiT
from routed import families
from routed.passes import Pass, routed
from routing_module import Route, Router, resolve_routes

FLUX, TWO = "FluxTransformer2DModel", [Route(0, 1, 0.5), Route(2, -1, 0.25)]
every_family = pytest.mark.parametrize("name", NETWORKS)


def assert_as_if_given_only_them(case, **options):
    """Kept tokens, and gradients, are those of the network fed with them alone; returns their ids and the gradients."""
    with routed(case.model, [Route(0, -1, 0.75)], **options) as routing:
        out = case.tokens(case.call())
    assert routing.trials and all(row.deviation < 1e-5 < row.tolerance for row in routing.trials)
    [ids] = routing.ids_keep
    kept = torch.stack([out[b, ids[b]] for b in range(BATCH)])
    weight = torch.randn(kept.shape)
    (kept * weight).sum().backward()
    grads = gradients(case.model)
    for b in range(BATCH):
        fewer = case.alone(b, ids[b])
        assert fewer.shape == (1, *kept.shape[1:])
        assert (fewer[0] - kept[b]).abs().max() < 1e-5 * max(1, float(fewer.detach().abs().max()))
        (fewer * weight[b]).sum().backward()
    assert_close(grads, gradients(case.model))
    return ids, grads


@every_family
def test_kept_tokens_come_out_as_if_the_network_had_been_given_only_them(name):
    case, noise = family(name), noise_for(family(name))
    ids, grads = assert_as_if_given_only_them(case, mask_noise=noise)
    assert torch.equal(ids, Router().get_mask(torch.empty(BATCH, case.n, 1), 0.75, noise[:, 0]))
    assert ids.shape == (BATCH, case.k) and len(grads) > 20


@every_family
def test_tokens_that_left_come_back_with_exactly_the_value_they_left_with(name, monkeypatch):
    """And their gradient comes back as it is, for they pass no block."""
    case, seen, call = family(name), {}, Pass.call

    def recorded(self, block, forward, args, kwargs):
        first = [*args, *kwargs.values()][0]
        out = call(self, block, forward, args, kwargs)
        if block.index == 1:
            seen["before"] = first
        if block.ends:
            seen["after"] = next(part for part in ([out] if isinstance(out, torch.Tensor) else out)
                                 if part.shape[1] >= case.n)
        return out

    monkeypatch.setattr(Pass, "call", recorded)
    with routed(case.model, [Route(1, -2, 0.5)]) as routing:
        case.call()

    def image(x):  # the tokens that may leave are the last of their sequence, where the case does not say otherwise
        first = case.first or [x.shape[1] - case.n - case.behind] * BATCH
        return torch.stack([x[b, first[b]:first[b] + case.n] for b in range(BATCH)])
    before, after = image(seen["before"]), image(seen["after"])
    left = torch.ones(BATCH, case.n, dtype=torch.bool).scatter_(1, routing.ids_keep[0], False)
    assert torch.equal(before[left], after[left])
    assert (before[~left] != after[~left]).any(dim=1).all()
    [gradient] = torch.autograd.grad(after[left].sum(), seen["before"])
    assert torch.equal(image(gradient), left[..., None].expand_as(before).float())


@every_family
def test_ratio_0_is_the_dense_network_bit_for_bit_and_so_is_the_network_outside(name):
    case = family(name)
    with torch.no_grad():
        dense, state = case.tokens(case.call()), torch.get_rng_state()
        with routed(case.model, [Route(0, -1, 0.0)]) as routing:
            assert torch.equal(case.tokens(case.call()), dense) and routing.ids_keep == [None]
        assert torch.equal(torch.get_rng_state(), state)
        with routed(case.model, [Route(0, -1, 0.5)]):
            assert not torch.allclose(case.tokens(case.call()), dense)
        assert torch.equal(case.tokens(case.call()), dense)
    assert not wrapped(case.model)


def in_training(name, checkpointed, **how):
    """A network with dropout, which makes any slip of the generator visible."""
    case = example(name)
    for module in case.model.train().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    if checkpointed:
        ours = partial(checkpoint, use_reentrant=False, **how)      # HunyuanImage needs it
        ways = {"enable_gradient_checkpointing": [ours], "set_grad_checkpointing": [],
                "activation_checkpointing_enable": []}
        [way] = [way for way in ways if hasattr(case.model, way)]
        getattr(case.model, way)(*ways[way])
    torch.manual_seed(5)
    return case


@pytest.mark.parametrize(("name", "fixed"), [
    # diffusers 0.42.1 hands Chroma's mask to no block that is checkpointed
    *((name, False) for name in NETWORKS if name != "ChromaTransformer2DModel, masked"), (FLUX, True),
    ("VisionTransformer", True)])
def test_gradient_checkpointing_uses_the_masks_of_its_own_pass(name, fixed):
    """Two passes wait for one backward outside the `with` block."""
    def trained(checkpointed):
        case = in_training(name, checkpointed)
        with routed(case.model, TWO, mask_noise=noise_for(case, 2) if fixed else None):
            out, again = case.tokens(case.call()), case.tokens(case.call())
        (out.square().mean() + 2 * again.mean()).backward()
        assert not wrapped(case.model)
        return out.detach(), gradients(case.model)

    (plain, expected), (out, grads) = trained(False), trained(True)
    assert torch.equal(out, plain)
    assert_close(grads, expected)


def matmuls(context, operation, *args, **kwargs):
    saved = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = dict(context_fn=partial(create_selective_checkpoint_contexts, matmuls))


@pytest.mark.parametrize("name", [FLUX, "FluxTransformer2DModel, Kontext", "WanTransformer3DModel"])
def test_selective_checkpointing_saves_and_recomputes_the_same_operations(name):
    def trained(checkpointed):
        case = in_training(name, checkpointed, **SELECTIVE)
        with routed(case.model, TWO):
            loss = case.tokens(case.call()).square().mean()
        loss.backward()
        return gradients(case.model)

    assert_close(trained(True), trained(False))


def test_images_that_are_conditions_never_leave_wherever_a_route_starts():
    case = family("Flux3Transformer2DModel, edit")
    for route in (Route(0, 1, 0.75), Route(0, -1, 0.75), Route(2, -1, 0.75)):  # in the last, they are in the stream
        with torch.no_grad(), routed(case.model, [route]) as routing:
            case.call()
        assert routing.ids_keep[0].shape == (BATCH, case.k)


@pytest.mark.parametrize(("around", "when"), [
    ("blocks", "in turn"), ("blocks", "the first pass first"), ("blocks", "on the next routes"),
    ("network", "inside"), ("loss", "inside")])
def test_backward_may_come_anywhere_and_in_any_order(around, when):
    def trained(checkpointed):
        case = in_training(FLUX, checkpointed and around == "blocks")

        def loss():
            if checkpointed and around == "network":
                return checkpoint(case.call, use_reentrant=False).exp().mean().sqrt()
            if checkpointed and around == "loss":
                return checkpoint(lambda: case.call().exp().mean().sqrt(), use_reentrant=False)
            return case.call().exp().mean().sqrt()

        with routed(case.model, TWO):
            first = loss()
            if when == "in turn":           # as where gradients are accumulated inside one block, here the first twice
                first.backward(retain_graph=True)
                first.backward()
            second = loss()
            if when == "inside":            # as a checkpoint around the network needs it
                first.backward()
                second.backward()
                return gradients(case.model)
        if when == "the first pass first":
            first.backward()
        elif when == "on the next routes":
            with routed(case.model, [Route(1, 2, 0.75)]):
                case.call()
                first.backward()
        second.backward()
        assert not wrapped(case.model)
        return gradients(case.model)

    assert_close(trained(True), trained(False))


def test_a_pass_that_broke_off_inside_a_checkpoint_frees_its_memory():
    net, x, condition = mine(checkpointed=True)
    x = x.requires_grad_() * 1
    seen = weakref.ref(x)
    net.transformer.h[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), routed(net, [Route(1, 3, 0.5)], **NAMED):
        net(x, condition)
    del x
    gc.collect()
    assert seen() is None and not wrapped(net)


def tread(**options):
    torch.manual_seed(1)
    return DiT(**dict(input_size=8, in_channels=3, hidden_size=32, depth=8, num_heads=2, num_classes=5, init="xavier")
               | options)


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.rand(4, generator=generator), torch.tensor([0, 1, 4, 5])


def test_our_own_network_gives_the_same_bits_as_by_its_argument_and_every_pass_samples_its_own_masks():
    net, routes, noise = tread(), resolve_routes([Route(-4, -2, 0.25), Route(1, 3, 0.5)], 8), torch.rand(4, 2, 16)
    with routed(net, [Route(-4, -2, 0.25), Route(1, 3, 0.5)], mask_noise=noise) as routing:
        out = net(*batch())
    assert torch.equal(out, net(*batch(), routes=routes, mask_noise=noise))
    assert [ids.shape for ids in routing.ids_keep] == [(4, 8), (4, 12)]  # in order of depth
    torch.manual_seed(9)
    with routed(net.train(), routes) as routing:
        out, masks = net(*batch()), routing.ids_keep
        net(*batch())
    assert not any(map(torch.equal, masks, routing.ids_keep))
    torch.manual_seed(9)
    assert torch.equal(out, net(*batch(), routes=routes))


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel"])
def test_autocast_routes_and_keeps_gradients_finite(name):
    case = family(name)
    with torch.autocast("cpu", torch.bfloat16), routed(case.model, TWO) as routing:
        out = case.call()
    out.float().mean().backward()
    assert out.isfinite().all() and all(grad.isfinite().all() for grad in gradients(case.model).values())
    assert routing.ids_keep[0].shape == (BATCH, 8)


@pytest.mark.parametrize("how", ["net.compile()", "torch.compile(net)", FLUX])
def test_a_compiled_network_is_two_graphs_one_dense_and_one_routed(how):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    net = tread(depth=4)
    compiled, run = copy.deepcopy(net), lambda model: model(*batch())
    if how == FLUX:
        compiled, run = copy.deepcopy(net := family(FLUX).model), family(FLUX).call
    if how == "net.compile()":
        compiled.compile(backend=backend, fullgraph=True)
    else:
        compiled = torch.compile(compiled, backend=backend, fullgraph=True)
    with torch.no_grad():
        dense = run(net)
        assert torch.allclose(run(compiled), dense, atol=1e-5) and len(graphs) == 1
        for seed in range(3):
            noise = torch.rand(len(dense), 2, N, generator=torch.Generator().manual_seed(seed))
            with routed(net, TWO, mask_noise=noise):
                expected = run(net)
            assert not torch.allclose(expected, dense, atol=1e-5)
            with routed(compiled, TWO, mask_noise=noise) as routing:
                assert torch.allclose(run(compiled), expected, atol=1e-5)
            assert routing.ids_keep[0].shape == (len(dense), 8)
            assert torch.allclose(run(compiled), dense, atol=1e-5) and len(graphs) == 2


@pytest.mark.parametrize("wrapped_by_accelerate", [False, True])
def test_a_copy_made_inside_a_route_is_dense_with_its_own_weights_and_may_be_routed_later(wrapped_by_accelerate):
    net = tread()
    if wrapped_by_accelerate:
        net.forward = partial(type(net).forward, net)
    with routed(net, TWO):
        ema = copy.deepcopy(net)
        with torch.no_grad():
            for parameter in ema.parameters():
                parameter.mul_(0.5)
        inside = ema(*batch())
        net(*batch())
    other = tread()
    other.load_state_dict(ema.state_dict())
    assert torch.equal(inside, other(*batch())) and torch.equal(ema(*batch()), inside)
    noise = torch.rand(4, 2, 16)
    with routed(ema, TWO, mask_noise=noise), routed(other, TWO, mask_noise=noise):
        assert torch.equal(ema(*batch()), other(*batch())) and not torch.equal(ema(*batch()), inside)


class RotaryBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, condition, rope):
        q, k, v = self.qkv(x + condition).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # (B, heads, N, 8)
        q, k = q * rope[None, None], k * rope[None, None]
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mine(nn.Module):
    """Somebody's network: a class token, a rotary table without a batch axis, a condition for each token."""

    def __init__(self, order=(0, 1, 2, 3), checkpointed=False, reentrant=False):
        super().__init__()
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(RotaryBlock() for _ in range(4))})
        self.order, self.checkpointed, self.reentrant = order, checkpointed, reentrant
        self.register_buffer("table", torch.randn(9, 8))

    def forward(self, x, condition, table=None):
        for block in (self.transformer.h[i] for i in self.order):
            call = partial(checkpoint, block, use_reentrant=self.reentrant) if self.checkpointed else block
            x = call(x, condition, self.table if table is None else table)
        return x


def mine(**options):
    torch.manual_seed(4)
    return Mine(**options), torch.randn(3, 9, 16), torch.randn(3, 9, 16)


NAMED = dict(blocks="transformer.h", along={"rope": 0, "condition": 1})


@pytest.mark.parametrize("blocks", ["transformer.h", None], ids=["path", "list"])
def test_a_custom_network_is_routed_by_blocks_along_and_keep(blocks):
    net, x, condition = mine()
    blocks = blocks or net.transformer.h
    with routed(net, [Route(0, -1, 0.5)], blocks=blocks, along={"rope": 0, 1: 1}, keep=1) as routing:
        out = net(x, condition)
    assert routing.ids_keep[0].max() < 8
    for b in range(3):
        stay = [0, *(1 + i for i in routing.ids_keep[0][b].tolist())]
        alone = net(x[b:b + 1, stay], condition[b:b + 1, stay], net.table[stay])
        assert torch.allclose(out[b, stay], alone[0], atol=1e-6)
        left = [i for i in range(9) if i not in stay]
        assert len(left) == 4 and torch.equal(out[b, left], x[b, left])


@pytest.mark.parametrize(("says", "of_network", "options"), [
    ("Mine of test_routed is not a known network (docs/trainers.md)", {}, dict(blocks=None, along=None)),
    ("Mine has no transformer.blocks with several blocks. Lists of blocks in it: transformer.h (4 of ", {},
     dict(blocks="transformer.blocks")),
    ("names 'rop'", {}, dict(along={"rop": 0})),
    ("9 of 9 tokens are never routed", {}, dict(keep=9)),
    ("mask_noise is torch.float32 (3, 1, 9), but it must be torch.float32 (3, 2, 9)", {},
     dict(mask_noise=torch.rand(3, 1, 9))),
    ("mask_noise is list", {}, dict(mask_noise=[0.5])),
    ("keep=(0, -1) must be a number of leading tokens: use keep_mask=", {}, dict(keep=(0, -1))),
    ("rope is (8, 8). Its axis 0 must be 9 long", dict(table=torch.randn(8, 8)), {}),
    ("After block 0 came block 2", dict(order=(0, 2, 1, 3)), {}),
    ("After block 2 came the end", dict(order=(0, 1, 2)), {}),
    ("Mine called none of its 4 blocks in transformer.h", dict(order=()), {}),
    ("block 0 of transformer.h runs without the gradient", dict(checkpointed=True, reentrant=True), {}),
    ("there are 9 tokens", {}, dict(router=Router("grid"))),
    ("as family= does: leave them out", {}, dict(family=families.CODES["Flux"][0])),
])
def test_what_cannot_be_routed_is_refused_with_the_reason(says, of_network, options):
    net, x, condition = mine(**{key: value for key, value in of_network.items() if key != "table"})
    x.requires_grad_()
    assert says in refused(net, TWO, lambda: net(x, condition, of_network.get("table")), **NAMED | options)


def test_networks_that_are_routed_already_or_known_or_run_as_copies_or_convolve_are_refused():
    net = tread()
    assert "routed already" in refused(net, TWO, lambda: routed(net, TWO).__enter__())
    assert "routes" in refused(net, TWO, lambda: net(*batch(), routes=resolve_routes(TWO, 8)))
    assert "DistributedDataParallel" in refused(nn.DataParallel(net), TWO)
    net.blocks = nn.ModuleList(nn.Conv1d(4, 4, 3) for _ in range(4))
    assert "convolves over the grid" in refused(net, TWO, blocks="blocks")
    assert "set batch_first=True" in refused(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 3), TWO,
                                             blocks="layers")


def test_a_padding_mask_is_named_and_a_nested_tensor_is_refused():
    net = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 3).eval()
    x, padding = torch.randn(3, N, 8), torch.arange(N) >= torch.tensor([[N], [N - 3], [4]])
    named = dict(blocks="layers", along={"src_key_padding_mask": 1})
    assert "src_key_padding_mask is (3, 16), as long as the tokens" in refused(
        net.train(), TWO[:1], lambda: net(x, src_key_padding_mask=padding), blocks="layers")
    with routed(net, TWO[:1], **named):
        net(x, src_key_padding_mask=padding)
    with torch.no_grad():
        assert "a nested tensor (set enable_nested_tensor=False)" in refused(
            net.eval(), TWO[:1], lambda: net(x, src_key_padding_mask=padding), **named)


def test_a_checkpoint_whose_pass_is_not_known_is_refused():
    net, x, condition = mine(checkpointed=True)
    dense = net(x.requires_grad_(), condition).sum()
    assert "dense pass" in refused(net, TWO, dense.backward, **NAMED)
    net = mine()[0]
    assert "use_reentrant=False" in refused(net, TWO, lambda: checkpoint(net, x, condition, use_reentrant=True),
                                            **NAMED)


@pytest.mark.parametrize(("name", "says", "inputs"), [
    (FLUX, "controlnet_block_samples", dict(controlnet_block_samples=[torch.zeros(BATCH, N, 16)])),
    ("SD3Transformer2DModel", "block_controlnet_hidden_states",
     dict(block_controlnet_hidden_states=[torch.zeros(BATCH, N, 16)])),
    (FLUX, "holds ['attention_mask']",
     dict(joint_attention_kwargs=dict(attention_mask=torch.ones(BATCH, 1, 1, N + TEXT) > 0))),
    ("SD3Transformer2DModel", "After block 0 came block 2", dict(skip_layers=[1])),
    ("VisionTransformer", "write along={'attn_mask': pairs}", dict(attn_mask=torch.ones(N + 1, N + 1))),
    ("LTX2VideoTransformer3DModel", "write along={'self_attention_mask': pairs}",
     dict(video_self_attention_mask=torch.ones(BATCH, N, N))),
    ("CogView4Transformer2DModel", "holds ['batch_flag']", dict(attention_kwargs=dict(batch_flag=torch.arange(BATCH)))),
    ("ZImageTransformer2DModel", "several sizes", dict(x=[torch.zeros(4, 1, 8, 8 + 8 * b) for b in range(BATCH)])),
    ("ZImageTransformer2DModel", "several images per sample", dict(x=[[torch.zeros(4, 1, 8, 16)]] * BATCH)),
])
def test_controlnet_masks_in_attention_arguments_and_skipped_layers_are_refused(name, says, inputs):
    case = family(name)
    assert says in refused(case.model, TWO, lambda: case.call(**inputs))


def test_the_network_is_as_it_was_after_an_error():
    net, x, condition = mine()
    dense = net(x, condition)
    net.forward = partial(Mine.forward, net)  # as accelerate gives a network a forward of its own
    forward = net.forward
    with pytest.raises(ValueError, match="fails when each sample"), routed(net, TWO, **NAMED):
        net(x[..., :8], condition)
    with routed(net, TWO, **NAMED):
        assert not torch.allclose(net(x, condition), dense)
    assert net.forward is forward and torch.equal(net(x, condition), dense)


NOT_YET = {  # classes of diffusers 0.42.1 that have no row, or that are parts of other networks
    "AceStepTransformer1DModel", "AllegroTransformer3DModel", "AnyFlowTransformer3DModel",
    "BriaFibo2Transformer2DModel", "ConsisIDTransformer3DModel", "Cosmos3OmniTransformer",
    "DreamLiteTransformer2DModel", "DualTransformer2DModel", "EasyAnimateTransformer3DModel",
    "ErnieImageTransformer2DModel", "GlmImageTransformer2DModel", "HeliosTransformer3DModel", "HunyuanDiT2DModel",
    "HunyuanVideoFramepackTransformer3DModel", "Ideogram4Transformer2DModel", "JoyImageEditPlusTransformer3DModel",
    "JoyImageEditTransformer3DModel", "Kandinsky6SRTransformer3DModel", "LatteTransformer3DModel",
    "LongCatAudioDiTTransformer", "LuminaNextDiT2DModel", "MiniMaxH3Transformer3DModel",
    "MiniMaxMusic3RVQDepthDecoder", "MiniMaxMusic3Transformer1DModel", "MotifVideoTransformer3DModel",
    "OmniGenTransformer2DModel", "PriorTransformer", "RFD4ProteinaTransformer", "SanaTransformer2DModel",
    "SanaVideoTransformer3DModel", "SanaWMTransformer3DModel", "StableAudio3DiTModel", "StableAudioDiTModel",
    "T5FilmDecoder", "Transformer2DModel", "TransformerTemporalModel", "WanAnimateTransformer3DModel",
}


def test_every_transformer_of_diffusers_is_known_or_refused_or_listed_here():
    """So that a new version shows what it brings, and each known network is tested and on the page."""
    classes = {name for name, part in vars(diffusers.models.transformers).items() if isinstance(part, type)}
    known = {name.partition(".")[2] for name in families.FAMILIES if name.startswith("diffusers.")}
    assert classes == known | NOT_YET | set(families.REFUSED)
    assert len(classes) == len(known) + len(NOT_YET) + len(families.REFUSED)
    assert {name.partition(".")[2] for name in families.FAMILIES} == {name.partition(",")[0] for name in NETWORKS} | {
        "DiT"}
    page = (Path(__file__).resolve().parents[2] / "docs" / "trainers.md").read_text()
    for name in [*families.FAMILIES, *families.CODES]:
        assert f"`{name.rpartition('.')[2]}`" in page


@pytest.mark.parametrize("name", families.REFUSED)
def test_networks_that_mix_tokens_in_other_ways_are_refused(name):
    network = type(name, (nn.Module,), dict(forward=lambda _: None))()
    assert families.REFUSED[name] in refused(network, TWO) and families.REFUSED[name] in refused(network, TWO,
                                                                                                 blocks="blocks")


def test_for_a_class_that_is_not_known_the_error_lists_its_blocks():
    network = diffusers.LuminaNextDiT2DModel(sample_size=4, hidden_size=16, num_layers=3, num_attention_heads=2,
                                             num_kv_heads=2)
    assert "layers (3 of LuminaNextDiTBlock)" in refused(network, TWO)


def test_each_block_on_a_route_is_tried_once():
    case = example("SD3Transformer2DModel")
    with torch.no_grad(), routed(case.model, TWO) as routing:
        case.call()
        case.call()
    assert [row.block for row in routing.trials] == [
        f"block {i} of transformer_blocks (JointTransformerBlock)" for i in range(4)]
