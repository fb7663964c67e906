"""weft.triton under Triton's interpreter, across rank processes; and what its functions compile to for a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compiled import for_a_gpu
from rank_pools import interpreted_ranks
from triton_kernels import copy_kernel, exchange_kernel, sums_kernel
from triton_work import (
    beside_operators,
    calls_without_end,
    documented,
    example_with_a_slow_rank,
    hammer,
    mistakes,
    numbers,
    one_rank_stays_away,
    run_example,
    run_protocol,
    used_when_over,
    wrap_around,
)

from weft.core.errors import WaitTimeout
from weft.runtime.ranks import Ranks
from weft.triton import Peers

pytestmark = pytest.mark.ranks
EXAMPLES = documented()


interpreted = interpreted_ranks([2], slow=[3])


@pytest.mark.parametrize("name", EXAMPLES)
def test_documented_example(interpreted: Ranks, name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(EXAMPLES[name], encoding="utf-8")
    interpreted.run(run_example, str(path), timeout_s=60)


@pytest.mark.parametrize(("name", "size"), [("exchange", 1), ("exchange", 77), ("exchange", 136), ("sums", 150), ("slices", 2)])
def test_calls_on_new_data(interpreted: Ranks, name: str, size: int) -> None:
    interpreted.run(run_protocol, name, size, "float32" if name == "sums" else "float16", 7, 0.2, timeout_s=60)


@pytest.mark.parametrize("dtype", ["float32", "int32", "int64"])
def test_no_addition_and_no_signal_is_lost(interpreted: Ranks, dtype: str) -> None:
    interpreted.run(hammer, dtype, 60, timeout_s=60)


def test_a_number_is_a_tile_too(interpreted: Ranks) -> None:
    interpreted.run(numbers, timeout_s=60)


def test_a_flag_may_wrap_around(interpreted: Ranks) -> None:
    interpreted.run(wrap_around, timeout_s=60)


def test_calls_may_be_more_than_32_bits_hold(interpreted: Ranks) -> None:
    interpreted.run(calls_without_end, timeout_s=60)


@pytest.mark.parametrize("interpreted", [3], indirect=True)
@pytest.mark.parametrize("name", ["4_reduce_by_the_owner", pytest.param("5_fused_operator", marks=pytest.mark.slow)])
def test_a_rank_that_is_ahead_does_not_stand_for_one_that_is_late(interpreted: Ranks, name: str) -> None:
    folder = Path(__file__).parents[2] / "examples" / "triton"
    interpreted.run(example_with_a_slow_rank, str(folder), name, timeout_s=120)


def test_a_wait_that_ends_while_the_host_waits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On whatever stream its kernel runs."""
    peers = object.__new__(Peers)
    peers.device, peers.status, peers.rank, peers.tries = torch.device("cuda", 0), torch.zeros(3, dtype=torch.int64), 0, 5
    peers._tensors, peers._rank_group = [], SimpleNamespace(fail=lambda error: error)  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: peers.status.copy_(torch.tensor([4096, 1, 0])))
    with pytest.raises(WaitTimeout, match="rank 0, kernel, flag at address 0x1000"):
        peers.check()


def test_a_rank_that_stays_away_is_told_of(interpreted: Ranks) -> None:
    """All that wait for it end at their bound, and it learns why the others are gone."""
    messages = interpreted.run(one_rank_stays_away, timeout_s=60)
    assert "PeerLost: rank" in messages.pop(1)
    for message in messages:
        assert "WaitTimeout: rank" in message
    assert any("flag arrived[" in message and "expected at least 1, seen 0" in message for message in messages)


def test_wrong_arguments_are_named(interpreted: Ranks) -> None:
    for negative, bad, mismatch in interpreted.run(mistakes):
        assert negative == "shape is (-1,); every extent must be a whole number of 0 or more"
        assert bad == [
            "shape is (True, 2); every extent must be a whole number of 0 or more",
            f"shape is ({1 << 61},), of torch.int32; no memory has 2^63 bytes",
            "dtype is torch.quint8; use torch.uint8 for bytes of any kind",
            "dtype is a str; it must be one of torch's, as torch.int32",
            "name is a int; it must be a word or two, for errors",
            "tensors has tensor 0, which these peers do not have, or have dropped",
            "one of tensors is a NoneType; pass what `tensor` returned",
            "tensors is a NoneType; pass what `tensor` returned, in a list",
            "group: this rank is not in it; make Peers on the group's ranks only",
        ]
        assert re.search(r"shape: rank (\d) has \(2, \1\), rank (\d) has \(2, \2\)", mismatch)


def test_peers_that_are_over_say_what_to_do(interpreted: Ranks) -> None:
    """Not weft.close(group), which is not of their business."""
    for messages in interpreted.run(used_when_over):
        assert messages[:2] == ["these Peers are closed; make new ones on every rank"] * 2
        assert messages[2:] == ["these Peers have failed (planted); close them, and make new ones on every rank"] * 2


def test_peers_and_operators_share_what_there_is_of_a_group(interpreted: Ranks) -> None:
    """They agree on calls, and fail, as one; whoever ends first does not end the other."""
    for of_operator, of_peers in interpreted.run(beside_operators):
        assert of_operator == "this process group has failed (planted); call weft.close(group) on every rank, then go on"
        assert of_peers.startswith("this process group has failed (planted); on every rank close its Peers")


def test_without_gpu_and_interpreter_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"TRITON_INTERPRET is not set and there is no GPU: set it to 1 before"):
        Peers()


POINTERS = {"x_ptr": "*bf16", "y_ptr": "*bf16", "out_ptr": "*bf16", "sum_ptr": "*fp32", "status_ptr": "*i64"}


def compiled_for_a_gpu(kernel: Any, **constants: int) -> str:
    return str(for_a_gpu(kernel, constants, POINTERS, warps=4).asm["ptx"])


@pytest.mark.parametrize("timeout_s", [0, float("inf"), float("nan"), "3"])
def test_a_bound_must_be_positive(timeout_s: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout_s is .*; it must be a number of seconds"):
        Peers(timeout_s=timeout_s)


@pytest.mark.parametrize("align", [1, 8])
def test_accesses_are_16_bytes_wide_on_a_gpu(align: int) -> None:
    """BLOCK is 8 elements for each of 128 threads; without the promise each is an access of its own."""
    text = compiled_for_a_gpu(exchange_kernel, BLOCK=1024, ALIGN=align)
    wide = [len(re.findall(rf"{access}\.v4\.b32", text)) for access in (r"ld\.global\.cg", r"st\.global")]
    narrow = [len(re.findall(rf"{access}\.b16", text)) for access in (r"ld\.global\.cg", r"st\.global")]
    assert (wide, narrow) == (([2, 2], [0, 0]) if align == 8 else ([0, 0], [16, 16]))


@pytest.mark.parametrize("kind", ["i1", "fp8e4nv"])
def test_types_of_a_byte_have_wide_accesses_on_a_gpu(kind: str) -> None:
    """Of bits and floats, masked, with nothing said of what the others are."""
    text = str(for_a_gpu(copy_kernel, {"BLOCK": 2048}, {"x_ptr": f"*{kind}", "y_ptr": f"*{kind}"}, warps=4).asm["ptx"])
    assert [len(re.findall(rf"{access}\.v4\.b32", text)) for access in (r"ld\.global\.cg", r"st\.global")] == [1, 1]


def test_flags_release_and_acquire_at_system_scope_on_a_gpu() -> None:
    text = compiled_for_a_gpu(exchange_kernel, BLOCK=1024, ALIGN=8)
    assert len(re.findall(r"(?:atom|red)\.global\.sys\.release\.add\.u32", text)) == 2
    assert len(re.findall(r"(?:ld|atom)\.global\.sys\.acquire", text)) == 4  # a first look and the next ones, of two waits
    assert "atom.global.sys.acq_rel.add.u32" in text  # end_call
    before, after = text.split("sys.release", 1)[0], text.split("sys.release", 1)[1]
    assert before.rindex("bar.sync") > before.rindex("st.global.v4")
    assert "ld.global.cg" in after


def test_additions_are_at_system_scope_on_a_gpu() -> None:
    text = compiled_for_a_gpu(sums_kernel, BLOCK=512)
    assert re.search(r"(?:atom|red)\.global\.sys\.relaxed\.add\.(?:v\d\.)?f32", text)
