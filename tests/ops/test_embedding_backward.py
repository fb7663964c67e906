"""The backward of embedding_bag_all_to_all on real ranks: gradients, optimizers that are applied at once, torch.compile."""

from __future__ import annotations

import operator
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from conftest import RankFixture
from embedding_backward import check_gradients, check_optimizer, close, flow, looked_up, ready, reference
from embedding_work import SPECS, Case, Drawn, options_of
from rank_pools import on_ranks

import weft

pytestmark = pytest.mark.ranks
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


@on_ranks(3)
def test_backward() -> None:
    plain = Case(dims=((8, 4),) * 3)
    uneven = Case(dims=((8,), (8, 12, 92), ()), batch=7)
    for turn, spec in enumerate(SPECS[::2]):
        check_gradients(plain, spec, turn)
        check_gradients(replace(uneven, weighted=True, index=torch.int32, spare=4), spec, turn)
        check_gradients(replace(uneven, mode="mean", dtype=torch.bfloat16), spec, turn)
        check_gradients(replace(uneven, mode="mean"), spec, turn, sparse=True)
        check_gradients(replace(plain, lengths=(0,)), spec, turn)
        for kind in ("sgd", "adagrad"):
            check_optimizer(plain, spec, turn, kind)
            check_optimizer(replace(uneven, weighted=True), spec, turn, kind)


@on_ranks(2)
def test_compiled_whole() -> None:
    """The whole graph, forward and backward, with batches of new lengths."""
    case = Case(dims=((8, 4), (92,)))

    def step(tables: list[torch.Tensor], indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        options = {"dims": case.dims, "schedule": "direct_store:1"}
        return weft.embedding_bag_all_to_all(indices, offsets, tables, per_sample_weights=weights, **options).sin()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed in range(3):
        drawn, again = (ready(replace(case, weighted=True), seed) for _ in range(2))
        for way, one in ((step, drawn), (compiled, again)):
            way(one.tables, one.indices, one.offsets, one.weights).sum().backward()  # type: ignore[operator]
        for mine, theirs in zip((*drawn.tables, drawn.weights), (*again.tables, again.weights), strict=True):
            assert mine is not None
            assert theirs is not None
            torch.testing.assert_close(mine.grad, theirs.grad)


@on_ranks(2)
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 does not compile a backward that changes what requires a gradient")
def test_compiled_with_an_optimizer() -> None:
    """The tables are updated by the compiled backward as by the plain one."""
    case = Case(dims=((8, 4), (92,)))

    def step(tables: list[torch.Tensor], indices: torch.Tensor, offsets: torch.Tensor, optimizer: object) -> torch.Tensor:
        options = {"dims": case.dims, "schedule": "direct_store:1", "optimizer": optimizer}
        return weft.embedding_bag_all_to_all(indices, offsets, tables, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    found = []
    for way in (step, compiled):
        drawn, optimizer = ready(case, 0), weft.RowwiseAdagrad(lr=0.1)
        optimizer.states_of(drawn.tables)
        for _ in range(2):
            way(drawn.tables, drawn.indices, drawn.offsets, optimizer).backward(flow(case, 0, dist.get_rank()))
        found.append([*drawn.tables, *optimizer.states])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


@on_ranks(3)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 does not compile a backward that changes what requires a gradient")
def test_compiled_beside_a_rank_without_tables(backend: str) -> None:
    """It takes part in the compiled backward, too, though nothing there is its own."""
    case = Case(dims=((8, 4), (92,), ()))

    def step(drawn: Drawn, optimizer: object) -> torch.Tensor:
        options = {"dims": case.dims, "schedule": "sequential", "optimizer": optimizer}
        return weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, **options_of(case, drawn) | options)

    for optimizer in (None, weft.SGD(lr=0.1)):
        found = []
        for way in (step, torch.compile(step, backend=backend, fullgraph=True)):
            drawn = ready(case, 0)
            for _ in range(2):
                way(drawn, optimizer).backward(flow(case, 0, dist.get_rank()))
            found.append([*drawn.tables, *(table.grad for table in drawn.tables if table.grad is not None)])
        for mine, theirs in zip(*found, strict=True):
            torch.testing.assert_close(mine, theirs)


@on_ranks(3)
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.skipif(TORCH < (2, 13), reason="torch 2.11 does not compile a backward that changes what requires a gradient")
def test_states_made_in_a_compiled_call(inference: bool) -> None:
    """As they are made in a plain one, and then kept; a graph that must be whole says what to call first."""
    case = Case(dims=((8, 4), (92,), ()))

    def step(drawn: Drawn, optimizer: object) -> torch.Tensor:
        options = {"dims": case.dims, "schedule": "sequential", "optimizer": optimizer}
        return weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, **options_of(case, drawn) | options)

    found = []
    for way in (step, torch.compile(step, backend="aot_eager")):
        drawn, optimizer = ready(case, 0), weft.RowwiseAdagrad(lr=0.1)
        with torch.inference_mode(inference):
            out = way(drawn, optimizer)
        made = list(optimizer.states)
        if not inference:
            out.backward(flow(case, 0, dist.get_rank()))
        way(drawn, optimizer).backward(flow(case, 0, dist.get_rank()))
        assert all(map(operator.is_, made, optimizer.states))
        found.append([*drawn.tables, *optimizer.states])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)

    torch._dynamo.reset()
    whole, drawn, optimizer = (
        torch.compile(step, backend="aot_eager", fullgraph=True),
        ready(case, 0),
        weft.RowwiseAdagrad(lr=0.1),
    )
    with torch.inference_mode(inference):
        if drawn.tables:
            with pytest.raises(RuntimeError, match=r"has no states yet; call optimizer.states_of\(tables\) once"):
                whole(drawn, optimizer)
        optimizer.states_of(drawn.tables)
        assert torch.equal(whole(drawn, optimizer), step(drawn, optimizer))


@on_ranks(2)
def test_two_lookups_before_one_backward() -> None:
    """Each backward changes the tables; the other one's lookup has been, and needs them no more."""
    case = Case(dims=((8, 4),) * 2)
    drawn, optimizer = ready(case, 0), weft.SGD(lr=0.1)
    options = {"optimizer": optimizer, "schedule": "direct_store:1"}
    outs = [weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, **options) for _ in range(2)]
    sum(outs).backward(flow(case, 0, dist.get_rank()))
    again = ready(case, 0)
    for _ in range(2):
        looked_up(case, 0, again, **options)
    for mine, theirs in zip(drawn.tables, again.tables, strict=True):
        torch.testing.assert_close(mine, theirs)


@on_ranks(3)
@pytest.mark.parametrize("weighted", [False, True])
def test_lookups_in_another_default_dtype(weighted: bool) -> None:
    case = Case(dims=((8,), (8, 12), (4,)), batch=7, weighted=weighted)
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        drawn = ready(case, 3)
        torch.set_default_dtype(dtype)
        try:
            options = {"dims": case.dims, "schedule": "sequential"}
            options |= {"per_sample_weights": drawn.weights} if weighted else {"mode": "mean"}
            out = weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, **options)
            out.square().sum().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        leaves = [*drawn.tables, *([drawn.weights] if drawn.weights is not None else [])]
        found.append([out, *(leaf.grad for leaf in leaves)])
    for other in found[1:]:
        for one, same in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, same, rtol=0, atol=0)


def _weights_of_one_rank() -> list[list[float]]:
    """Two lookups whose tables an optimizer updates: rank 0 asks for the gradient of the first one's weights, rank 1 of the
    other's."""
    rank = dist.get_rank()
    tables = [torch.zeros(4, 2, requires_grad=True) for _ in range(2)]
    weights = [torch.full((4,), 3.0, requires_grad=rank == lookup) for lookup in range(2)]
    options = {"dims": [[2], [2]], "batch": 4, "schedule": "direct_store", "optimizer": weft.SGD(lr=1.0)}
    with torch.no_grad():
        for table in tables:
            table += 1
    outs = [
        weft.embedding_bag_all_to_all(torch.arange(4), torch.arange(5), [table], per_sample_weights=weight, **options)  # type: ignore[arg-type]
        for table, weight in zip(tables, weights, strict=True)
    ]
    (10 * outs[0].sum() + 1000 * outs[1].sum()).backward()
    found = weights[rank].grad
    assert found is not None
    assert weights[1 - rank].grad is None
    return [tables[0][:, 0].tolist(), tables[1][:, 0].tolist(), found.tolist()]


def test_ranks_may_differ_in_whether_weights_need_gradients(ranks: RankFixture) -> None:
    """One exchange on each, or one would take the other's rows."""
    for rank, found in enumerate(ranks(2).run(_weights_of_one_rank)):
        # The gradient of a weight is that of its row of the table before the step: two columns of 1.
        assert found == [[1 - 30.0] * 4, [1 - 3000.0] * 4, [20.0 if rank == 0 else 2000.0] * 4]


def _changed_since() -> list[str]:
    """Weights' gradients are of rows that an optimizer, or the caller, has changed since: by one lookup, or on one rank."""
    outcomes, options = [], {"dims": [[2], [2]], "batch": 4, "optimizer": weft.SGD(lr=1.0)}
    for lookups, changed_on, retain in ((2, None, False), (1, 1, False), (1, None, True), (1, None, False)):
        weft.close()
        dist.barrier()
        table, weights = torch.ones(4, 2, requires_grad=True), torch.ones(4, requires_grad=True)
        given = (torch.arange(4), torch.arange(5), [table])
        try:
            outs = [weft.embedding_bag_all_to_all(*given, per_sample_weights=weights, **options) for _ in range(lookups)]  # type: ignore[arg-type]
            with torch.no_grad():
                table.mul_(2) if changed_on == dist.get_rank() else None
            for _ in range(1 + retain):
                sum(out.sum() for out in outs).backward(retain_graph=retain)  # type: ignore[union-attr]
            outcomes.append(str(weights.grad.tolist()))  # type: ignore[union-attr]
        except (ValueError, weft.WeftError) as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    weft.close()
    return outcomes


def test_weights_have_no_gradients_of_rows_that_are_gone(ranks: RankFixture) -> None:
    says = "ValueError: tables[0] has changed since its lookup, and the gradient of per_sample_weights is of what it was"
    for rank, (twice, by_one, again, once) in enumerate(ranks(2).run(_changed_since)):
        assert twice.startswith(says)
        assert by_one.startswith(says if rank == 1 else "PeerLost: rank 1 failed: tables[0] has changed since")
        assert again.startswith(says)
        assert once == "[2.0, 2.0, 2.0, 2.0]"


@on_ranks(2)
def test_gradients_of_weights_alone() -> None:
    """Of frozen tables, and of tables that only another rank trains: the gradients that are theirs with the tables'."""
    case, rank = Case(dims=((8, 4), (92,)), weighted=True), dist.get_rank()
    for frozen_on in ((0, 1), (0,)):
        drawn = ready(case, 0)
        for table in drawn.tables:
            table.requires_grad_(rank not in frozen_on)
        looked_up(case, 0, drawn)
        assert drawn.weights is not None
        assert drawn.weights.grad is not None
        close(drawn.weights.grad, reference(case, 0, rank)[1], case.dtype)  # type: ignore[arg-type]
        assert all((table.grad is None) == (rank in frozen_on) for table in drawn.tables)


@on_ranks(2)
@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_no_samples(weighted: bool) -> None:
    """A batch of none: gradients are zero."""
    case = Case(dims=((8, 4), (92,)), batch=0, weighted=weighted, spare=3)
    for sparse in (False, True):
        drawn = ready(case, 0)
        looked_up(case, 0, drawn, sparse=sparse)
        for given in (*drawn.tables, *([] if drawn.weights is None else [drawn.weights])):
            assert given.grad is not None
            assert (given.grad.shape, given.grad.is_sparse) == (given.shape, sparse and given.dim() == 2)
            assert not given.grad.to_dense().any()


@on_ranks(2)
def test_an_optimizer_that_is_first_used_in_inference() -> None:
    """States that a first lookup has made without a backward, as a model's that is evaluated before it is trained."""
    case = Case(dims=((8, 4), (92,)))
    found = []
    for inference in (True, False):
        drawn, optimizer = ready(case, 0), weft.RowwiseAdagrad(lr=0.1)
        with torch.inference_mode(inference), torch.no_grad():
            out = weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, dims=case.dims, optimizer=optimizer)
        assert not out.requires_grad
        looked_up(case, 0, drawn, optimizer=optimizer)
        found.append([*drawn.tables, *optimizer.states])
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def _fails_alone(how: str) -> tuple[str, float]:
    """What a rank is told whose peer fails in its own backward, and how soon; then the group is used again."""
    case, rank = Case(dims=((8, 4), (92,))), dist.get_rank()
    drawn, optimizer = ready(case, 0), weft.RowwiseAdagrad(lr=0.1) if how == "within" else None
    out = weft.embedding_bag_all_to_all(drawn.indices, drawn.offsets, drawn.tables, dims=case.dims, optimizer=optimizer)
    begun, message = time.monotonic(), ""
    if rank and how == "before":
        drawn.tables[0].detach().zero_()  # what is saved for the backward is another table now
    elif rank:
        optimizer.states[0].resize_(0)  # type: ignore[union-attr]
    try:
        out.sum().backward()
        weft.all_gather_matmul(torch.ones(2, 2), torch.ones(2, 2))
    except (RuntimeError, IndexError) as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - begun
    weft.close()
    looked_up(case, 0, ready(case, 0))
    return message, seconds


@pytest.mark.parametrize(("how", "culprit"), [("before", "modified by an inplace operation"), ("within", "IndexError")])
def test_a_rank_that_fails_alone_is_named_soon(ranks: RankFixture, how: str, culprit: str) -> None:
    """It leaves no exchange of the process group half done, which would be the bound of that, and the end of it."""
    for rank, (message, seconds) in enumerate(ranks(2).run(_fails_alone, how)):
        assert (culprit if rank else "PeerLost: rank 1 failed: ") in message, message
        assert seconds < 15, "the group's own bound is 20 s"


def _in_another_order() -> str:
    """Two lookups of which one rank takes the gradients the other way round."""
    outs = []
    for dims in ([[2], [2]], [[4], [4]]):
        table = torch.ones(4, dims[0][0], requires_grad=True)
        outs.append(weft.embedding_bag_all_to_all(torch.arange(4), torch.arange(5), [table], dims=dims, batch=4))
    try:
        for out in outs if dist.get_rank() else reversed(outs):
            out.sum().backward()
    except weft.WeftError as error:
        return str(error)
    finally:
        weft.close()
    return ""


def test_backwards_in_another_order_are_named(ranks: RankFixture) -> None:
    for message in ranks(2).run(_in_another_order):
        assert "dims: rank " in message
