"""Device functions with which Triton kernels exchange data with kernels of other ranks. They need no patched Triton.

    peer_pointer                              returns the address of a symmetric tensor on a peer
    put  get  reduce_add                      move tiles to and from there
    signal  wait  put_signal                  use flags: release, and acquire with a bound, at system scope
    remote_first  last_of                     order tiles; find the last block of a slice
    call_number  end_call                     count calls; flags are compared with the number of the call

Contract. Symmetric tensors, their tables of addresses, status and tries come from `weft.triton.Peers`. A flag is an int32
element of a symmetric tensor. It only grows, and waits compare with "at least", so a late rank cannot miss a value. Waits
compare the difference, so a flag may wrap around.

Order. When a block signals, everything that its threads have stored or added before is visible to every thread of a block that
has waited for that signal, on any rank:

    block of rank 0: put, put, reduce_add -> barrier -> signal (release, system)
                                                           ~> block of rank 1: wait (acquire, system) -> get

`get` bypasses this SM's L1 cache, which may hold old data. After a wait, use it to read what peers wrote, also in your own
memory. Loads by tensor descriptors (TMA) are not ordered by any of this.

Progress. A waiting block holds its SM, so it may only wait for blocks that are running or have ended: launch no more blocks
than `Peers.resident_blocks`, and let them loop. Triton's interpreter runs the blocks of a rank one after the other, so a block
may only wait for blocks of lower or equal number on other ranks, or for earlier work of its own. A kernel of one block
satisfies both if it sends everything that its peers wait for before its own first wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.triton.flags import behind, look, look_until


@triton.jit
def peer_pointer(local_ptr, peers_ptr, peer):
    """Return a pointer to the first element of a symmetric tensor on rank `peer`.

    local_ptr: the tensor on this rank, which gives the type. peers_ptr: its table, `SymmetricTensor.peers`. The compiler
    gets the hint that the address is a multiple of 16 bytes; without it, accesses through a table move element by element.
    """
    address = tl.load(peers_ptr + peer)
    return tl.multiple_of(address.to(tl.pointer_type(local_ptr.dtype.element_ty)), 16)


@triton.jit
def _places(base_ptr, offsets, ALIGN: tl.constexpr):
    """Return the pointers of a tile with the hint that ALIGN neighbours are contiguous."""
    pointers = base_ptr + offsets
    BYTES: tl.constexpr = ALIGN * ((base_ptr.dtype.element_ty.primitive_bitwidth + 7) // 8)  # a bool has one bit, and a byte
    if ALIGN > 1:
        tl.static_assert(len(offsets.shape) <= 2, "ALIGN is for tiles of one or two dimensions")
        if len(offsets.shape) == 1:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, [BYTES]), [ALIGN])
        else:
            pointers = tl.max_contiguous(tl.multiple_of(pointers, [1, BYTES]), [1, ALIGN])
    return pointers


@triton.jit
def _inside(mask, offsets, ALIGN: tl.constexpr):
    """Return the mask with the hint that ALIGN neighbours are equal."""
    if ALIGN > 1:
        # A hint needs an operation, and the mask may be an argument, so this comparison carries it.
        mask = mask & (offsets >= 0)
        mask = tl.max_constancy(mask, [ALIGN]) if len(offsets.shape) == 1 else tl.max_constancy(mask, [1, ALIGN])
    return mask


@triton.jit
def put(dst_ptr, offsets, value, mask=None, ALIGN: tl.constexpr = 1):
    """Store a tile, or a number: value[i] to dst_ptr + offsets[i] where mask[i], converted to the type of dst_ptr.

    dst_ptr: memory of a peer (`peer_pointer`), or of this rank. offsets: in elements, not negative. ALIGN: in elements, a power
    of two: the caller's promise that every run of ALIGN neighbours of the tile's last dimension is contiguous, begins at a
    multiple of ALIGN * itemsize bytes, and has one mask value. If ALIGN is 16 bytes, accesses are 16 bytes wide, whatever the
    compiler knows of offsets and mask. The peer may read the tile after it has waited for a `signal`.
    """
    if mask is None:
        tl.store(_places(dst_ptr, offsets, ALIGN), value)
    else:
        tl.store(_places(dst_ptr, offsets, ALIGN), value, mask=_inside(mask, offsets, ALIGN))


@triton.jit
def get(src_ptr, offsets, mask=None, other=0.0, ALIGN: tl.constexpr = 1):
    """Load a tile that a peer wrote, or that is on a peer: src_ptr[offsets[i]] where mask[i], else `other`.

    It bypasses this SM's L1 cache. offsets, ALIGN: as for `put`.
    """
    if mask is None:
        return tl.load(_places(src_ptr, offsets, ALIGN), cache_modifier=".cg")
    else:  # noqa: RET505 - one of the two is compiled
        return tl.load(_places(src_ptr, offsets, ALIGN), mask=_inside(mask, offsets, ALIGN), other=other, cache_modifier=".cg")


@triton.jit
def reduce_add(dst_ptr, offsets, value, mask=None):
    """Add a tile to memory of a peer or of this rank: float32, int32 or int64. Each element is one atomic add at system scope.

    The order in which ranks add differs from call to call, and with it the rounding of float32. A reader must wait until all
    ranks have added (`signal`, then `wait`), and a rank may add only after the sums have been zeroed. 16-bit types are refused,
    because they would round at each addition.
    """
    tl.static_assert(
        (dst_ptr.dtype.element_ty == tl.float32)
        or (dst_ptr.dtype.element_ty == tl.int32)
        or (dst_ptr.dtype.element_ty == tl.int64),
        "reduce_add takes float32, int32 and int64",
    )
    tl.atomic_add(dst_ptr + offsets, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def signal(flag_ptr, by=1):
    """Add `by` to a flag, here or at a peer. Everything that this block has stored before is visible to a rank that sees the
    new value.

    All threads of the block must call it, once for one tile or for many. Any number of blocks and ranks may signal one flag;
    then only its full count implies that all of them have signalled.
    """
    # The barrier orders every thread's stores before the one release that publishes them.
    tl.debug_barrier()
    tl.atomic_add(flag_ptr, by, sem="release", scope="sys")


@triton.jit
def wait(flag_ptr, at_least, tries, status_ptr):
    """Wait until a flag holds at least `at_least`, and return whether it did within `tries` looks.

    flag_ptr: in this rank's memory, because a look at a peer's crosses the link. tries, status_ptr: those of `Peers`.
    The first wait of a kernel that gives up stores the flag's address, at_least and the seen value there, and `Peers.check`
    raises WaitTimeout from them. Later waits give up immediately, so that a kernel ends after one timeout.
    """
    seen = look(flag_ptr)
    if behind(seen, at_least):
        # One thread reads it for all, since warps that saw different values would diverge here.
        looks = tl.where(tl.atomic_add(status_ptr, 0, sem="relaxed", scope="gpu") == 0, 0, tries)
        seen = look_until(flag_ptr, at_least, seen, looks, tries)
        if behind(seen, at_least):
            address = flag_ptr.to(tl.int64)
            if tl.atomic_cas(status_ptr, tl.zeros_like(address), address) == 0:
                tl.store(status_ptr + 1, at_least)
                tl.store(status_ptr + 2, seen)
    return behind(seen, at_least) == 0


@triton.jit
def put_signal(dst_ptr, offsets, value, mask, flag_ptr, by=1, ALIGN: tl.constexpr = 1):
    """`put` a tile, then `signal` a flag at the same peer, which notifies the receiver.

    If a block puts several tiles for one flag, put them all and signal once: a release waits until the peer has received all
    earlier stores.
    """
    put(dst_ptr, offsets, value, mask, ALIGN)
    signal(flag_ptr, by)


@triton.jit
def remote_first(tile, tiles_per_rank, rank, world_size):
    """Return (dst_rank, tile of dst_rank) of a linear tile in [0, world_size * tiles_per_rank). Peers come first, from the
    successor on, and this rank comes last.

    Remote tiles start first, own tiles are computed during their transfer, and no two ranks send to one peer at the same time.
    """
    return (rank + 1 + tile // tiles_per_rank) % world_size, tile % tiles_per_rank


@triton.jit
def last_of(count_ptr, arrivals):
    """Return true in the last of `arrivals` blocks that call it.

    count_ptr: int32 or int64 in this rank's memory, zero before the first block; zero again when the last has come. Acquires
    and releases at system scope: the last block sees what the others stored, and its signal also publishes their stores, here
    and at peers. The counter may be used again after the last block: by a later kernel, or by one that waits for it.
    """
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="sys") == arrivals - 1
    if last:
        tl.atomic_xchg(count_ptr, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def call_number(calls_ptr):
    """Return the number of this call of the kernel, 1 in the first. A flag that grows by D a call is awaited with call_number *
    D.

    calls_ptr: `Peers.calls()`: two int64 counters of one kernel, on this rank. The kernel itself counts, because the arguments
    of a replayed CUDA graph never change. Every block reads the number before `end_call`; the last block to arrive there writes
    the next one, and the next call runs after this one. So nobody reads it while it changes.
    """
    return tl.load(calls_ptr) + 1


@triton.jit
def end_call(calls_ptr):
    """End a call of a kernel that uses `call_number`. Every block calls it once, as its last action."""
    if last_of(calls_ptr + 1, tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)):
        tl.store(calls_ptr, tl.load(calls_ptr) + 1)
