"""`routed` takes other people's networks on a route, exactly: the real classes of diffusers and timm, tiny and random."""

import copy
import gc
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace

import diffusers
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from dit import DiT
from foreign.families import FAMILIES
from foreign.routed import routed
from routing_module import Route, Router, resolve_routes

BATCH, SIDE, TEXT, DEPTH = 3, 4, 5, 4
N, K = SIDE * SIDE, 4           # at selection ratio 0.75 the tokens that stay form a 2x2 grid, which a network can be fed
HEADS = dict(num_attention_heads=2, attention_head_dim=8)


class Swapped(nn.Module):
    """A part of a network that answers what it is told to."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, *args, **kwargs):
        return self.answer(*args, **kwargs)


def patches(image):
    """Pixels as tokens: (B, C, 2h, 2w) to (B, hw, 4C)."""
    return nn.functional.pixel_unshuffle(image, 2).flatten(2).transpose(1, 2)


def ids_of_grid(side):
    row, column = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack([torch.zeros(side**2), row.flatten(), column.flatten()], dim=1)


def example(name):
    """A network, the inputs of a batch, what of its output are tokens, and how sample b is fed the tokens `ids` alone.

    `alone(b, ids)` returns parts to swap and inputs with which the network itself, dense, computes on these tokens only,
    each at its own position. None of it knows how `routed` works.
    """
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    def randn(*shape):
        return torch.randn(*shape, generator=generator)
    x, text, t = randn(BATCH, 4, 2 * SIDE, 2 * SIDE), randn(BATCH, TEXT, 16), torch.tensor([1.0, 30.0, 500.0])
    small = torch.zeros(1, 4, 4, 4)
    tokens = patches
    def one(inputs, b, **others):
        rows = {key: value[b:b + 1] if isinstance(value, torch.Tensor) and len(value) == BATCH else value
                for key, value in inputs.items()}
        return rows | others

    def pos_embed_alone(b, ids):
        embed = model.pos_embed
        return {"pos_embed": lambda _: embed(x[b:b + 1])[:, ids]}, one(inputs, b, hidden_states=small)

    alone = pos_embed_alone
    if name == "DiT":
        model = diffusers.DiTTransformer2DModel(sample_size=8, in_channels=4, out_channels=4, num_layers=DEPTH,
                                                num_embeds_ada_norm=1000, **HEADS)
        inputs = dict(hidden_states=x, timestep=t.long(), class_labels=torch.tensor([1, 2, 3]))
    elif name.startswith("PixArt"):
        model = diffusers.PixArtTransformer2DModel(sample_size=8, in_channels=4, out_channels=4, num_layers=DEPTH,
                                                   cross_attention_dim=16, caption_channels=16, **HEADS)
        inputs = dict(hidden_states=x, timestep=t, encoder_hidden_states=text, added_cond_kwargs={})
        if name == "PixArt, masked":
            mask = torch.rand(BATCH, N, generator=generator) > 0.3
            inputs |= dict(attention_mask=mask)

            def alone(b, ids):
                parts, fed = pos_embed_alone(b, ids)
                return parts, fed | dict(attention_mask=mask[b:b + 1, ids])
    elif name.startswith("SD3"):
        options = dict(qk_norm="rms_norm", dual_attention_layers=(0, 1)) if name == "SD3.5" else {}
        model = diffusers.SD3Transformer2DModel(
            sample_size=8, in_channels=4, out_channels=4, num_layers=DEPTH, joint_attention_dim=16,
            caption_projection_dim=16, pooled_projection_dim=16, pos_embed_max_size=8, **HEADS, **options)
        inputs = dict(hidden_states=x, timestep=t, encoder_hidden_states=text, pooled_projections=randn(BATCH, 16))
    elif name == "AuraFlow":
        model = diffusers.AuraFlowTransformer2DModel(
            sample_size=8, num_mmdit_layers=2, num_single_dit_layers=2, joint_attention_dim=16, caption_projection_dim=16,
            pos_embed_max_size=64, **HEADS)
        inputs = dict(hidden_states=x, timestep=t / 1000, encoder_hidden_states=text)
    elif name in ("Flux", "Flux2"):
        tokens, axes = torch.Tensor.detach, dict(num_layers=2, num_single_layers=2, in_channels=4, joint_attention_dim=16)
        if name == "Flux":
            model = diffusers.FluxTransformer2DModel(pooled_projection_dim=16, axes_dims_rope=(2, 2, 4), **axes, **HEADS)
            more, img_ids = dict(pooled_projections=randn(BATCH, 16), txt_ids=torch.zeros(TEXT, 3)), ids_of_grid(SIDE)
        else:
            model = diffusers.Flux2Transformer2DModel(axes_dims_rope=(2, 2, 2, 2), guidance_embeds=False, **axes, **HEADS)
            more, img_ids = dict(txt_ids=torch.arange(4 * TEXT).view(TEXT, 4) / 7), ids_of_grid(SIDE)[:, [0, 1, 2, 0]]
        inputs = dict(hidden_states=randn(BATCH, N, 4), encoder_hidden_states=text, timestep=t / 1000, img_ids=img_ids) | more

        def alone(b, ids):
            return {}, one(inputs, b, hidden_states=inputs["hidden_states"][b:b + 1, ids], img_ids=img_ids[ids])
    elif name.startswith("Qwen"):
        model = diffusers.QwenImageTransformer2DModel(
            in_channels=4, out_channels=1, num_layers=DEPTH, joint_attention_dim=16, axes_dims_rope=(2, 2, 4),
            zero_cond_t=name == "Qwen-Image, edit", **HEADS)
        shapes = [(1, 2, SIDE), (1, 2, SIDE)] if name == "Qwen-Image, edit" else [(1, SIDE, SIDE)]
        text_mask = torch.ones(BATCH, TEXT)
        text_mask[1, 3:] = 0
        inputs = dict(hidden_states=randn(BATCH, N, 4), encoder_hidden_states=text, timestep=t / 1000,
                      encoder_hidden_states_mask=text_mask, img_shapes=[shapes] * BATCH)

        def alone(b, ids):
            image, of_text = model.pos_embed([shapes], max_txt_seq_len=TEXT, device=torch.device("cpu"))
            first = int((ids < N // 2).sum())       # of an edit's two images, the second is a condition
            fed = [(1, 1, first), (1, 1, K - first)] if len(shapes) == 2 else [(1, 2, 2)]
            return ({"pos_embed": lambda *_, **__: (image[ids], of_text)},
                    one(inputs, b, hidden_states=inputs["hidden_states"][b:b + 1, ids], img_shapes=[fed]))
    elif name == "Lumina2":
        model = diffusers.Lumina2Transformer2DModel(
            sample_size=8, in_channels=4, hidden_size=24, num_layers=DEPTH, num_refiner_layers=0, num_attention_heads=2,
            num_kv_heads=1, multiple_of=8, axes_dim_rope=(4, 4, 4), axes_lens=(32, 16, 16), cap_feat_dim=16)
        mask = torch.ones(BATCH, TEXT, dtype=torch.int64)
        mask[1, 2:], mask[2, 4:] = 0, 0
        inputs = dict(hidden_states=x, timestep=t / 1000, encoder_hidden_states=text, encoder_attention_mask=mask)

        def alone(b, ids):
            embed, rope, length = model.x_embedder, model.rope_embedder, int(mask[b].sum())
            whole = rope(x[b:b + 1], mask[b:b + 1])

            def told(hidden, attention_mask):
                few = list(rope(hidden, attention_mask))
                few[3] = torch.cat([whole[3][:, :length], whole[3][:, length:][:, ids]], dim=1)
                return tuple(few)
            return ({"x_embedder": lambda _: embed(whole[0])[:, ids], "rope_embedder": told},
                    one(inputs, b, hidden_states=small))
    elif name.startswith("Wan"):
        model = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=DEPTH,
            num_attention_heads=2, attention_head_dim=12, rope_max_seq_len=16)
        per_token = name == "Wan, a time for each token"
        time = torch.rand(BATCH, N, generator=generator) * 1000 if per_token else t
        inputs = dict(hidden_states=x[:, :, None], timestep=time, encoder_hidden_states=text)

        def tokens(video):
            return patches(video[:, :, 0])

        def alone(b, ids):
            embed, rope = model.patch_embedding, model.rope
            return ({"patch_embedding": lambda _: embed(x[b:b + 1, :, None]).flatten(2)[:, :, ids].view(1, -1, 1, 2, 2),
                     "rope": lambda _: tuple(table[:, ids] for table in rope(x[b:b + 1, :, None]))},
                    one(inputs, b, hidden_states=small[:, :, None],
                        timestep=time[b:b + 1, ids] if per_token else time[b:b + 1]))
    elif name.startswith("ViT"):
        model = VisionTransformer(img_size=8, patch_size=2, in_chans=4, embed_dim=16, depth=DEPTH, num_heads=2, num_classes=0,
                                  global_pool="", reg_tokens=2 if name == "ViT, registers" else 0)
        prefix = model.num_prefix_tokens
        inputs = dict(x=x)

        def tokens(features):
            return features[:, prefix:]

        def alone(b, ids):
            whole = model._pos_embed
            places = torch.cat([torch.arange(prefix), ids + prefix])
            return {"_pos_embed": lambda _: whole(model.patch_embed(x[b:b + 1]))[:, places]}, dict(x=x[b:b + 1])
    with torch.no_grad():
        for parameter in model.parameters():        # every gate open, no layer that starts as zero
            parameter.copy_(parameter + 0.05 * torch.randn(parameter.shape, generator=generator))
    blocks = [block for path in LISTS[name.partition(",")[0]].split() for block in model.get_submodule(path)]
    return SimpleNamespace(model=model.eval(), inputs=inputs, alone=alone, blocks=blocks,
                           tokens=(lambda out: out) if name.startswith("Flux") or name.startswith("Qwen") else tokens)


LISTS = {"DiT": "transformer_blocks", "PixArt": "transformer_blocks", "SD3": "transformer_blocks", "SD3.5": "transformer_blocks",
         "Flux": "transformer_blocks single_transformer_blocks", "Flux2": "transformer_blocks single_transformer_blocks",
         "AuraFlow": "joint_transformer_blocks single_transformer_blocks", "Lumina2": "layers",
         "Qwen-Image": "transformer_blocks", "Wan": "blocks", "ViT": "blocks"}
NAMES = [*LISTS, "PixArt, masked", "Qwen-Image, edit", "Wan, a time for each token", "ViT, registers"]
family = cache(example)
every_family = pytest.mark.parametrize("name", NAMES)


def call(case, model=None):
    out = (case.model if model is None else model)(**case.inputs)
    return getattr(out, "sample", out)


def noise_for(routes=1, seed=3):
    return torch.rand(BATCH, routes, N, generator=torch.Generator().manual_seed(seed))


def gradients(model):
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_close(a, b, tolerance=1e-5):
    assert a.keys() == b.keys()
    for name in a:
        scale = max(1.0, float(b[name].abs().max()))
        assert (a[name] - b[name]).abs().max() <= tolerance * scale, name


@every_family
def test_tokens_that_stay_come_out_as_if_the_network_had_been_fed_them_alone(name):
    case = family(name)
    weight = torch.randn(BATCH, K, case.tokens(call(case)).shape[-1])
    with routed(case.model, [Route(0, -1, 0.75)], mask_noise=noise_for()) as taken:
        out = case.tokens(call(case))
    ids = taken.ids_keep[0]
    assert torch.equal(ids, Router().get_mask(torch.empty(BATCH, N, 1), 0.75, noise_for()[:, 0]))
    stayed = torch.stack([out[b, ids[b]] for b in range(BATCH)])
    (stayed * weight).sum().backward()
    routed_gradients = gradients(case.model)
    assert len(routed_gradients) > 20
    for b in range(BATCH):
        parts, fed = case.alone(b, ids[b])
        before = {part: getattr(case.model, part) for part in parts}
        for part, answer in parts.items():
            setattr(case.model, part, Swapped(answer) if isinstance(before[part], nn.Module) else answer)
        fewer = case.model(**fed)
        for part in parts:
            delattr(case.model, part)
            if isinstance(before[part], nn.Module):
                setattr(case.model, part, before[part])
        fewer = case.tokens(getattr(fewer, "sample", fewer))
        assert fewer.shape[:2] == (1, K)
        assert (fewer[0] - stayed[b]).abs().max() < 1e-5 * max(1, float(fewer.detach().abs().max()))
        (fewer * weight[b]).sum().backward()
    assert_close(routed_gradients, gradients(case.model))


@every_family
def test_tokens_that_left_come_back_with_exactly_the_value_they_left_with(name):
    """And their gradient comes back as it is, for they pass no block."""
    case, seen = family(name), {}

    def last_of(value):         # the tokens that may leave are the last of a sequence, or of the last of a tuple
        return value[-1] if isinstance(value, tuple) else value

    hooks = [case.blocks[1].register_forward_pre_hook(
                 lambda _, args, kwargs: seen.update(before=(args or [*kwargs.values()])[0]), with_kwargs=True),
             case.blocks[-2].register_forward_hook(lambda _, args, out: seen.update(after=last_of(out)))]
    with routed(case.model, [Route(1, -2, 0.5)]) as taken:
        call(case)
    for hook in hooks:
        hook.remove()
    text = case.inputs["encoder_attention_mask"].sum(dim=1).tolist() if name == "Lumina2" else None
    def image(x):
        return torch.stack([x[b, text[b]:text[b] + N] if text else x[b, -N:] for b in range(BATCH)])
    before, after = image(seen["before"]), image(seen["after"])
    left = torch.ones(BATCH, N, dtype=torch.bool).scatter_(1, taken.ids_keep[0], False)
    assert torch.equal(before[left], after[left])
    assert (before[~left] != after[~left]).any(dim=1).all()
    [gradient] = torch.autograd.grad(after[left].sum(), seen["before"])
    assert torch.equal(image(gradient), left[..., None].expand_as(before).float())


@every_family
def test_ratio_0_is_the_dense_network_bit_for_bit_and_so_is_the_network_outside(name):
    case = family(name)
    with torch.no_grad():
        dense, state = call(case), torch.get_rng_state()
        with routed(case.model, [Route(0, -1, 0.0)]) as taken:
            assert torch.equal(call(case), dense) and taken.ids_keep == [None]
        assert torch.equal(torch.get_rng_state(), state)
        with routed(case.model, [Route(0, -1, 0.5)]):
            assert not torch.allclose(call(case), dense)
        assert torch.equal(call(case), dense)
    assert not any("forward" in vars(module) for module in case.model.modules())


TWO = [Route(0, 1, 0.5), Route(2, -1, 0.25)]


@pytest.mark.parametrize(("name", "fixed"), [*((name, False) for name in NAMES), ("Flux", True), ("ViT", True)])
def test_gradient_checkpointing_sees_the_masks_of_its_own_pass(name, fixed):
    """Two passes wait for one backward outside the `with` block, and dropout makes any slip of the generator visible."""
    case = family(name)
    droppers = [module for module in case.model.modules() if isinstance(module, nn.Dropout)]

    def trained(checkpointed):
        if isinstance(case.model, VisionTransformer):
            case.model.set_grad_checkpointing(checkpointed)
        else:
            (case.model.enable_gradient_checkpointing if checkpointed else case.model.disable_gradient_checkpointing)()
        torch.manual_seed(5)
        with routed(case.model, TWO, mask_noise=noise_for(2) if fixed else None):
            out, again = call(case), call(case)
        (out.square().mean() + 2 * again.mean()).backward()
        return out.detach(), gradients(case.model)

    case.model.train()
    for dropper in droppers:
        dropper.p = 0.1
    try:
        (plain, expected), (out, found) = trained(False), trained(True)
    finally:
        trained(False)
        case.model.eval()
        for dropper in droppers:
            dropper.p = 0.0
    assert torch.equal(out, plain)
    assert_close(found, expected)
    gc.collect()
    assert not any("forward" in vars(module) for module in case.model.modules())


def test_a_whole_network_inside_one_checkpoint_sees_its_masks_too():
    case = family("Flux")

    def loss(checkpointed):
        torch.manual_seed(5)
        with routed(case.model, TWO):
            out = torch.utils.checkpoint.checkpoint(lambda: call(case), use_reentrant=False) if checkpointed else call(case)
        out.square().mean().backward()
        return gradients(case.model)

    assert_close(loss(True), loss(False))


def test_reentrant_checkpointing_is_refused_as_it_would_lose_gradient():
    _, x, condition = mine()

    class Recomputed(Mine):
        def forward(self, x, condition):
            for block in self.transformer.h:
                x = torch.utils.checkpoint.checkpoint(block, x, condition, use_reentrant=True)
            return x

    net = Recomputed()
    assert "use_reentrant=False" in refused(net, call=lambda: net(x.requires_grad_(), condition), blocks="transformer.h",
                                            along={"condition": 1})


def own(**options):
    torch.manual_seed(1)
    return DiT(**dict(input_size=8, in_channels=3, hidden_size=32, depth=8, num_heads=2, num_classes=5, init="xavier") | options)


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.rand(4, generator=generator), torch.tensor([0, 1, 4, 5])


def test_our_own_network_gives_the_same_bits_as_by_its_argument():
    net, routes = own(), resolve_routes([Route(-4, -2, 0.25), Route(1, 3, 0.5)], 8)
    noise = torch.rand(4, 2, 16)
    with routed(net, [Route(-4, -2, 0.25), Route(1, 3, 0.5)], mask_noise=noise) as taken:
        out = net(*batch())
    assert torch.equal(out, net(*batch(), routes=routes, mask_noise=noise))
    assert [ids.shape for ids in taken.ids_keep] == [(4, 8), (4, 12)]       # in order of depth
    torch.manual_seed(9)
    with routed(net.train(), routes):
        out = net(*batch())
    torch.manual_seed(9)
    assert torch.equal(out, net(*batch(), routes=routes))


def test_every_pass_draws_masks_of_its_own():
    net = own()
    with routed(net, TWO) as taken:
        masks = [(net(*batch()), taken.ids_keep)[1] for _ in range(2)]
    assert not torch.equal(masks[0][0], masks[1][0]) and not torch.equal(masks[0][1], masks[1][1])


def test_autocast_routes_and_keeps_gradients_finite():
    for name in ("SD3", "Flux2", "Wan"):
        case = family(name)
        with torch.autocast("cpu", torch.bfloat16), routed(case.model, TWO) as taken:
            out = call(case)
        out.float().mean().backward()
        assert out.isfinite().all() and all(grad.isfinite().all() for grad in gradients(case.model).values())
        assert taken.ids_keep[0].shape == (BATCH, 8)


class Counted:
    """A backend of torch.compile that counts graphs and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("in_place", [True, False], ids=["net.compile()", "torch.compile(net)"])
def test_a_compiled_network_is_two_graphs_one_dense_and_one_routed(in_place):
    torch._dynamo.reset()
    net, backend = own(depth=4), Counted()
    compiled = torch.compile(copy.deepcopy(net), backend=backend, fullgraph=True)
    if in_place:
        compiled = copy.deepcopy(net)
        compiled.compile(backend=backend, fullgraph=True)
    dense = net(*batch()).detach()
    assert torch.allclose(compiled(*batch()), dense, atol=1e-6) and backend.graphs == 1
    for seed in range(2):
        noise = torch.rand(4, 2, 16, generator=torch.Generator().manual_seed(seed))
        with routed(net, TWO, mask_noise=noise):
            expected = net(*batch()).detach()
        with routed(compiled, TWO, mask_noise=noise) as taken:
            assert torch.allclose(compiled(*batch()), expected, atol=1e-6)
        assert taken.ids_keep[0].shape == (4, 8)
        assert torch.allclose(compiled(*batch()), dense, atol=1e-6)
        assert backend.graphs == 2


def test_flux_compiled_is_one_graph_with_each_samples_own_rotary_table():
    torch._dynamo.reset()
    case, backend = family("Flux"), Counted()
    compiled = torch.compile(case.model, backend=backend, fullgraph=True)
    with torch.no_grad():
        with routed(case.model, TWO, mask_noise=noise_for(2)):
            expected = call(case)
        with routed(compiled, TWO, mask_noise=noise_for(2)):
            assert torch.allclose(call(case, compiled), expected, atol=1e-5)
    assert backend.graphs == 1


def test_ddp_routes_the_network_inside(tmp_path):
    net, noise = own(), torch.rand(4, 2, 16)
    with routed(net, TWO, mask_noise=noise):
        net(*batch()).square().mean().backward()
    expected = gradients(net)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        replica = nn.parallel.DistributedDataParallel(net)
        with routed(replica, TWO, mask_noise=noise):
            loss = replica(*batch()).square().mean()
        loss.backward()
        assert_close(gradients(net), expected, 1e-6)
    finally:
        torch.distributed.destroy_process_group()


def test_a_copy_made_on_the_way_is_a_network_of_its_own():
    net = own()
    with routed(net, TWO):
        out = net(*batch())
        other = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert out.grad_fn is not None and other(*batch()).abs().max() == 0 and net(*batch()).abs().max() > 0


class RotaryBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, condition, rope=None):
        q, k, v = self.qkv(x + condition).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)       # (B, heads, N, 8)
        if rope is not None:
            q, k = q * rope[None, None], k * rope[None, None]
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mine(nn.Module):
    """Somebody's network: a class token, a rotary table without a batch axis, a condition for each token."""

    def __init__(self, order=(0, 1, 2, 3)):
        super().__init__()
        self.transformer = nn.ModuleDict({"h": nn.ModuleList(RotaryBlock() for _ in range(4))})
        self.order = order
        self.register_buffer("table", torch.randn(9, 8))

    def forward(self, x, condition, table=None, **extra):
        for i in self.order:
            x = self.transformer.h[i](x, condition, rope=self.table if table is None else table, **extra)
        return x


def mine(**options):
    torch.manual_seed(4)
    return Mine(**options), torch.randn(3, 9, 16), torch.randn(3, 9, 16)


@pytest.mark.parametrize(("keep", "places"), [(1, range(1, 9)), ((0, -1), range(1, 8))])
@pytest.mark.parametrize("blocks", ["transformer.h", None], ids=["path", "list"])
def test_a_network_of_ones_own_is_routed_by_three_words_about_it(keep, places, blocks):
    net, x, condition = mine()
    blocks = blocks or net.transformer.h
    with routed(net, [Route(0, -1, 0.5)], blocks=blocks, along={"rope": 0, 1: 1}, keep=keep) as taken:
        out = net(x, condition)
    assert taken.ids_keep[0].max() < len(places)
    for b in range(3):
        stay = sorted({*range(9)} - {*places} | {places[i] for i in taken.ids_keep[0][b].tolist()})
        alone = net(x[b:b + 1, stay], condition[b:b + 1, stay], net.table[stay])
        assert torch.allclose(out[b, stay], alone[0], atol=1e-6)
        left = [i for i in range(9) if i not in stay]
        assert len(left) == len(places) // 2 and torch.equal(out[b, left], x[b, left])


def refused(model, routes=TWO, call=None, **options):
    with pytest.raises(ValueError) as error, routed(model, routes, **options):
        if call:
            call()
    assert not any("forward" in vars(module) for module in model.modules())
    return str(error.value)


def test_what_cannot_be_routed_is_refused_with_the_reason():
    net, x, condition = mine()
    name = dict(blocks="transformer.h", along={"rope": 0, "condition": 1})
    assert "blocks=" in refused(net) and "Mine" in refused(net)
    assert "has no list of blocks 'h'; it has transformer" in refused(net, blocks="h")
    assert "leaves the network: with 4 blocks" in refused(net, [Route(0, 4, 0.5)], **name)
    assert "names 'rop'" in refused(net, blocks="transformer.h", along={"rop": 0})
    assert "9 of 9 tokens never leave" in refused(net, call=lambda: net(x, condition), keep=9, **name)
    assert "is (8, 8), and its axis 0 is neither 9" in refused(net, call=lambda: net(x, condition, net.table[:8]), **name)
    assert "mask_noise is (3, 1, 9), but it must be (3, 2, 9)" in refused(
        net, call=lambda: net(x, condition), mask_noise=torch.rand(3, 1, 9), **name)
    for order, says in (((0, 2, 1, 3), "out of order: block 2 after block 0"), ((0, 1, 2), "last to be called was block 2"),
                        ((), "last to be called was block -1")):
        net.order = order
        with torch.no_grad():
            assert says in refused(net, call=lambda: net(x, condition), **name)
    net = own()
    assert "routed already" in refused(net, call=lambda: routed(net, TWO).__enter__())
    assert "routes" in refused(net, call=lambda: net(*batch(), routes=resolve_routes(TWO, 8)))
    assert "along= and keep= are for" in refused(net, keep=1)
    assert "DistributedDataParallel" in refused(nn.DataParallel(net))


def test_networks_whose_tokens_meet_by_other_ways_are_refused():
    sana = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, num_cross_attention_heads=2, cross_attention_head_dim=8,
        cross_attention_dim=16, caption_channels=16, sample_size=4, patch_size=1, **HEADS)
    assert "convolve" in refused(sana) and "convolve" in refused(sana, blocks="transformer_blocks")
    hunyuan = diffusers.HunyuanDiT2DModel(
        sample_size=8, patch_size=2, in_channels=4, hidden_size=16, num_layers=4, cross_attention_dim=16, cross_attention_dim_t5=16,
        pooled_projection_dim=16, text_len=2, text_len_t5=2, mlp_ratio=2.0, **HEADS)
    assert "long skips" in refused(hunyuan)
    network = nn.Module()
    network.blocks = nn.ModuleList(nn.Conv1d(4, 4, 3) for _ in range(4))
    assert "convolves over the grid" in refused(network, blocks="blocks")


def test_controlnet_masks_in_attention_arguments_and_skipped_layers_are_refused():
    flux, sd3, vit = family("Flux"), family("SD3"), family("ViT")
    residual = [torch.zeros(BATCH, N, 16)]
    assert "controlnet_block_samples" in refused(
        flux.model, call=lambda: flux.model(**flux.inputs, controlnet_block_samples=residual))
    assert "block_controlnet_hidden_states" in refused(
        sd3.model, call=lambda: sd3.model(**sd3.inputs, block_controlnet_hidden_states=residual))
    mask = torch.ones(BATCH, 1, 1, N + TEXT, dtype=torch.bool)
    assert "holds ['attention_mask']" in refused(
        flux.model, call=lambda: flux.model(**flux.inputs, joint_attention_kwargs=dict(attention_mask=mask)))
    assert "block 2 after block 0" in refused(sd3.model, call=lambda: sd3.model(**sd3.inputs, skip_layers=[1]))
    assert "attn_mask" in refused(vit.model, call=lambda: vit.model(**vit.inputs, attn_mask=torch.ones(N + 1, N + 1)))


def test_an_error_inside_a_block_leaves_the_network_as_it_was():
    net, x, condition = mine()
    with pytest.raises(RuntimeError), routed(net, TWO, blocks="transformer.h"):     # the table stays as long as it was
        net(x, condition)
    with torch.no_grad():
        dense = net(x, condition)
        with routed(net, TWO, blocks="transformer.h", along={"rope": 0, "condition": 1}):
            net(x, condition)
        assert torch.equal(net(x, condition), dense)
    assert not any("forward" in vars(module) for module in net.modules())


def test_a_context_in_which_the_network_is_not_called_is_no_error():
    with nullcontext(), routed(own(), TWO) as taken:
        pass
    assert taken.ids_keep == [None, None]


def test_the_table_of_networks_is_the_one_that_is_tested():
    tested = {type(family(name).model).__name__ for name in NAMES} | {"DiT"}
    assert {name.partition(".")[2] for name in FAMILIES} == tested


def test_the_example_trains_dense_and_routed_in_turn(capsys):
    pytest.importorskip("peft", reason="the example's LoRA is PEFT's, which is optional")
    from examples import route_diffusers

    route_diffusers.main(["--steps", "1", "--side", "4"])
    said = capsys.readouterr().out
    assert said.count("routed step") == 2 and "SD3" in said and "Flux" in said
