"""Backward in any order, checkpoints, threads, copies, compilation and other ways into a network."""

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from library_networks import example, family
from oracle import BATCH, N, assert_close, assert_exact, gradients, is_routed, randn, refused
from small_networks import CODES, TABLE, D, Plain, X, made
from test_keep_mask import mask_for
from test_libraries import noise_for
from test_situations import turned
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dit import DiT
from routed import Route, routed
from routed.families import family_of
from routing_module import resolve_routes

TWO, MIDDLE = [Route(0, 1, 0.5), Route(2, -1, 0.25)], [Route(1, 2, 0.5)]
NAMED = dict(blocks="blocks", along={"rope": 0})


def matmuls(context, operation, *args, **kwargs):
    saved = operation in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = dict(context_fn=partial(create_selective_checkpoint_contexts, matmuls))


@pytest.mark.parametrize("how", [{}, SELECTIVE, dict(preserve_rng_state=False)], ids=["full", "selective", "no state"])
@pytest.mark.parametrize(("around", "when"), [
    ("blocks", "in turn"), ("blocks", "the first pass first"), ("blocks", "on the next routes"), ("blocks", "behind"),
    ("a wrapper of blocks", "behind"), ("a wrapper of blocks", "inside"), ("a wrapper of the network", "inside"),
    ("the network", "inside"), ("the network", "behind")])
def test_backward_may_come_anywhere_and_in_any_order(around, when, how):
    again, wrapped = (partial(one, **how) for one in (partial(checkpoint, use_reentrant=False), checkpoint_wrapper))

    def trained(around):
        net = model = made(turned(lambda rope: rope[None, None]), lambda part, x: (
            again(part, x, TABLE) if around == "blocks" else part(x, TABLE))).model
        if around == "a wrapper of blocks":
            net.blocks = nn.ModuleList(map(wrapped, net.blocks))
        elif around == "a wrapper of the network":
            model = wrapped(net)
            with routed(model, [], **NAMED):
                model(x=X)
        call = partial(again, net) if around == "the network" else model
        torch.manual_seed(5)

        def loss(seed):
            if "preserve_rng_state" in how:     # a backward between two passes has drawn numbers
                torch.manual_seed(seed)
            return call(x=X).exp().mean().sqrt()

        with routed(model, TWO, **NAMED):
            first = loss(5)
            if when == "in turn":           # as where gradients are accumulated, here the first twice
                first.backward(retain_graph=how is not SELECTIVE)
                if how is not SELECTIVE:    # a selective checkpoint's operations are recomputed once
                    first.backward()
            second = loss(6)
            if when == "inside":
                first.backward()
                second.backward()
        if when == "the first pass first":
            first.backward()
        elif when == "on the next routes":
            with routed(model, [Route(1, 2, 0.75)], **NAMED):
                model(x=X)
                first.backward()
        elif when == "behind":
            second = second if how is SELECTIVE else first + second
        if when != "inside":
            second.backward()
        assert not is_routed(net)
        return {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in gradients(net).items()}

    assert_close(trained(around), trained(None))


@pytest.mark.parametrize("broken", [None, 0, 1, 2, 3])
def test_the_tokens_of_a_pass_are_freed_also_where_a_block_raises(broken):
    """A circle of tokens, their graph and its pass would stay for ever."""
    seen = []

    def recomputed(part, x):
        seen.append(weakref.ref(x))
        if broken == len(seen) - 1:
            part.register_forward_pre_hook(lambda *_: {}[broken])       # as where memory is full
        return checkpoint(part, x, TABLE, use_reentrant=False)

    net = made(turned(lambda rope: rope[None, None]), recomputed).model
    with nullcontext() if broken is None else pytest.raises(KeyError), routed(net, TWO, **NAMED):
        net(x=X.clone().requires_grad_() * 1).sum().backward()
    gc.collect()
    assert len(seen) == (4 if broken is None else broken + 1)
    assert all(tokens() is None for tokens in seen) and not is_routed(net)


def test_the_network_is_as_it_was_after_an_error_and_keeps_another_forward():
    net = Plain()
    dense, net.forward = net(X), partial(Plain.forward, net)        # as accelerate gives a network a forward of its own
    forward = net.forward
    with pytest.raises(KeyError), routed(net, TWO, **NAMED):
        raise KeyError                      # rather than that the network was not called
    with pytest.raises((RuntimeError, ValueError)), routed(net, TWO, **NAMED):
        net(X[..., :2])
    with routed(net, TWO, **NAMED):
        assert not torch.allclose(net(X), dense)
        full = Mock(side_effect=torch.cuda.OutOfMemoryError)
        with net.blocks[2].register_forward_pre_hook(full), pytest.raises(torch.cuda.OutOfMemoryError):
            net(X)                          # a trainer goes on with the next batch
    assert net.forward is forward and torch.equal(net(X), dense)


def test_another_thread_sees_the_dense_network_and_so_does_a_block_without_routes():
    net, noise = Plain(), torch.rand(BATCH, 1, N)
    dense, state = net(X), torch.get_rng_state()
    for routes in ([], [Route(0, -1, 0.0)]):
        with routed(net, routes, **NAMED) as routing:
            assert torch.equal(net(X), dense) and routing.ids_keep == [None] * len(routes)
    assert torch.equal(torch.get_rng_state(), state)
    with routed(net, MIDDLE, mask_noise=noise, **NAMED):
        out = net(X)
        with routed(net, [], **NAMED):
            assert torch.equal(net(X), dense)
        assert torch.equal(net(X), out) and not torch.allclose(out, dense)
        with ThreadPoolExecutor(1) as other:
            sampler = routed(net, [], **NAMED)
            other.submit(sampler.__enter__).result()
            assert torch.equal(other.submit(net, X).result(), dense) and torch.equal(net(X), out)
            other.submit(sampler.__exit__, None, None, None).result()
    assert torch.equal(net(X), dense)


def test_a_parameter_that_blocks_share_may_be_an_argument_without_gradients():
    net = made(lambda self, x, shift: self.attend(x + shift), lambda part, x: part(x, shift)).model
    shift = nn.Parameter(torch.ones(D))
    with torch.no_grad(), routed(net, MIDDLE, blocks="blocks") as routing:
        net(x=X)
    assert len(routing.trials) == 2


@pytest.mark.parametrize("wrapped_by_accelerate", [False, True])
def test_a_network_is_copied_and_saved_as_a_dense_one_of_its_own(wrapped_by_accelerate):
    net = Plain()
    if wrapped_by_accelerate:
        net.forward = partial(Plain.forward, net)
    dense = net(X)
    with routed(net, MIDDLE, **NAMED):
        loss = net(X).square().mean()
        copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    for other in (copied, pickled, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other) is Plain and torch.equal(other(X), dense) and "_routed" not in vars(other)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    halved, noise = Plain(), torch.rand(BATCH, 1, N)
    halved.load_state_dict(copied.state_dict())
    with routed(copied, MIDDLE, mask_noise=noise, **NAMED), routed(halved, MIDDLE, mask_noise=noise, **NAMED):
        assert torch.equal(copied(X), halved(X))
    assert torch.equal(net(X), dense) and loss.isfinite()


def test_a_network_of_compiled_blocks_is_copied_after_its_first_route():
    net = Plain()
    net.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in net.blocks)
    with routed(net, MIDDLE, **NAMED):
        net(X)
    assert torch.equal(copy.deepcopy(net)(X), net(X))


def tread(depth=4):
    torch.manual_seed(1)
    return DiT(input_size=8, in_channels=3, hidden_size=32, depth=depth, num_heads=2, num_classes=5, init="xavier")


BATCH_OF_4 = randn(4, 3, 8, 8), randn(4).sigmoid(), torch.tensor([0, 1, 4, 5])


def test_our_own_network_gives_the_same_bits_as_by_its_argument_and_every_pass_samples_its_own_masks():
    net, noise, given = tread(depth=8), torch.rand(4, 2, 16), [Route(-4, -2, 0.25), Route(1, 3, 0.5)]
    routes = resolve_routes(given, 8)
    with routed(net, given, mask_noise=noise) as routing:
        out = net(*BATCH_OF_4)
    assert torch.equal(out, net(*BATCH_OF_4, routes=routes, mask_noise=noise))
    assert [ids.shape for ids in routing.ids_keep] == [(4, 8), (4, 12)]  # in order of depth
    torch.manual_seed(9)
    with routed(net.train(), routes) as routing:
        out, masks = net(*BATCH_OF_4), routing.ids_keep
        net(*BATCH_OF_4)
    assert not any(map(torch.equal, masks, routing.ids_keep))
    torch.manual_seed(9)
    assert torch.equal(out, net(*BATCH_OF_4, routes=routes))
    assert "routed already" in refused(net, TWO, lambda: routed(net, TWO).__enter__())
    assert "computes with the others" in refused(net, TWO, lambda: net(*BATCH_OF_4, routes=routes))


# ---- compilation ----------------------------------------------------------------------------------------------------


@pytest.fixture
def counted():
    """Options to compile a network as one graph, whose backend counts the graphs."""
    torch._dynamo.reset()
    return dict(backend=CompileCounter(), fullgraph=True)


@pytest.mark.parametrize("how", ["net.compile()", "torch.compile(net)", "FluxTransformer2DModel"])
def test_a_compiled_network_is_two_graphs_one_dense_and_one_routed(how, counted):
    net, run = tread(), lambda model: model(*BATCH_OF_4)
    if how == "FluxTransformer2DModel":
        net, run = family(how).model, family(how).call
    fast, graphs = copy.deepcopy(net), counted["backend"]
    if how == "net.compile()":
        fast.compile(**counted)
    else:
        fast = torch.compile(fast, **counted)
    with torch.no_grad():
        dense = run(net)
        assert torch.allclose(run(fast), dense, atol=1e-5) and graphs.frame_count == 1
        for seed in range(3):
            noise = torch.rand(len(dense), 2, N, generator=torch.Generator().manual_seed(seed))
            with routed(net, TWO, mask_noise=noise):
                expected = run(net)
            assert not torch.allclose(expected, dense, atol=1e-5)
            with routed(fast, TWO, mask_noise=noise) as routing:
                assert torch.allclose(run(fast), expected, atol=1e-5)
            assert routing.ids_keep[0].shape == (len(dense), 8) and len(routing.trials) == 4
            # the first dense graph was that of another class
            assert torch.allclose(run(fast), dense, atol=1e-5) and graphs.frame_count == 3


def test_a_compiled_network_is_routed_at_every_size_and_sizes_are_dynamic_from_the_second_on(counted):
    """Four tokens of text stand in front. With mask_noise, whose size is a constant, each size is compiled."""
    net = made(turned(lambda rope: rope[:, None]), lambda part, x: part(x, torch.ones(1, x.shape[1], 4).cumsum(1)),
               depth=1).model
    fast = torch.compile(net, **counted)
    for length, count in ((16, 1), (24, 2), (36, 2)):
        x, outs = randn(3, length, 8), []
        for model in (net, fast):
            torch.manual_seed(length)
            with torch.no_grad(), routed(model, [Route(0, 0, 0.5)], blocks="blocks", along={"rope": 1},
                                         keep=4) as routing:
                outs.append(model(x=x))
            assert routing.ids_keep[0].shape == (3, (length - 4) // 2)
        assert torch.allclose(*outs, atol=1e-5) and counted["backend"].frame_count == count


def test_a_compiled_network_keeps_the_tokens_of_a_mask_in_one_graph_or_raises_an_error(counted):
    case = CODES["SiT"]()
    net, fast = case.model, torch.compile(case.model, **counted)
    with torch.no_grad():
        for counts in ((8, 0, 1), (2, 5, 8)):
            noise, some = torch.rand(BATCH, 2, N), mask_for(case, *counts)
            with routed(net, TWO, keep_mask=some, mask_noise=noise) as routing:
                expected, ids = net(x=X), routing.ids_keep
            with routed(fast, TWO, keep_mask=some, mask_noise=noise, grow=False) as routing:
                assert torch.allclose(fast(x=X), expected, atol=1e-5)
            assert all(map(torch.equal, ids, routing.ids_keep)) and counted["backend"].frame_count == 1
        with pytest.raises(RuntimeError, match="keeps more tokens than are kept"), \
             routed(fast, TWO, keep_mask=mask_for(case, 9, 0, 0), grow=False):
            fast(x=X)
        flux = torch.compile(CODES["Flux"]().model, **counted)
        places = torch.zeros(BATCH, N, 3)
        places[:, 10:] = 1                  # of a condition image
        with pytest.raises(RuntimeError, match="With condition images compile the blocks"), routed(flux, TWO):
            flux(x=X, img_ids=places)


@pytest.mark.parametrize(("name", "how"), [
    ("FluxTransformer2DModel, Kontext", "compile_repeated_blocks"), ("WanTransformer3DModel", "torch.compile")])
def test_compiled_blocks_are_routed_with_and_without_checkpointing(name, how):
    def trained(how="", checkpointed=False):
        case = example(name)
        if checkpointed:
            case.model.enable_gradient_checkpointing()
        torch._dynamo.reset()
        if how == "compile_repeated_blocks":
            case.model.compile_repeated_blocks(backend="aot_eager", fullgraph=True)
        for spec in family_of(case.model.train()).lists if how == "torch.compile" else ():
            blocks = case.model.get_submodule(spec.path)
            for i, block in enumerate(blocks):
                blocks[i] = torch.compile(block, backend="aot_eager", fullgraph=True)
        with routed(case.model, TWO, mask_noise=noise_for(case, 2)) as routing:
            out, again = case.call(), case.call(timestep=case.inputs["timestep"] / 2)
        assert routing.ids_keep[0].shape == (BATCH, 8)
        (out.square().mean() + 2 * again.mean()).backward()
        return out.detach(), {key.replace("_orig_mod.", ""): grad for key, grad in gradients(case.model).items()}

    plain, expected = trained()
    for checkpointed in (False, True):
        out, found = trained(how, checkpointed)
        assert torch.allclose(out, plain, atol=1e-5)
        assert_close(found, expected)


# ---- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel", "WanTransformer3DModel"])
def test_lora_on_an_8_bit_base_trains_as_if_given_only_the_kept_tokens(name):
    pytest.importorskip("torchao", reason="8 bits are torchao's, which is optional")
    peft = pytest.importorskip("peft", reason="the LoRA is PEFT's, which is optional")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    case = example(name)
    case.model.requires_grad_(False)
    quantize_(case.model, Int8WeightOnlyConfig())
    assert any("Int8" in type(p.data).__name__ or "Quant" in type(p.data).__name__ for p in case.model.parameters())
    case.model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"],
                                           init_lora_weights=False))
    _, found = assert_exact(case)
    assert found and all("lora" in key for key in found)


def test_the_lora_of_the_page_trains():
    pytest.importorskip("peft", reason="the LoRA is PEFT's, which is optional")
    page = (Path(__file__).resolve().parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    exec(page.partition("## LoRA with PEFT")[2].partition("```python\n")[2].partition("```")[0], {})
