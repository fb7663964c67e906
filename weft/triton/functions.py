"""Functions that any Triton kernel may call to exchange data with the kernels of other ranks. Stock Triton, nothing patched.

    peer_pointer                              address of a symmetric tensor on a peer
    put  get  reduce_add                      tiles to and from there
    signal  wait  put_signal                  flags: release, and acquire with a bound, at system scope
    remote_first  last_of                     order of tiles; the last block of a slice
    call_number  end_call                     what flags are compared with, from call to call

Contract. Symmetric tensors, their tables of addresses, status and tries come from `weft.triton.Peers`. A flag is an int32
word of a symmetric tensor. It only grows, and is waited for with "at least": a rank that is late cannot miss it. Compared is
the difference, so a flag may wrap around.

Order. What any thread of a block has stored or added before it signals, is there for every thread of a block that has waited
for that signal, on any rank:

    block of rank 0: put, put, reduce_add -> barrier -> signal (release, system)
                                                           ~> block of rank 1: wait (acquire, system) -> get

`get` reads past this SM's first-level cache, which may hold what lay there before: after a wait, read with it what peers
wrote, in your own memory too. Loads by tensor descriptors (TMA) are not ordered by any of this.

Progress. Blocks that wait hold their SM. What a block waits for must come from blocks that run already or have ended: launch
no more blocks than `Peers.resident_blocks`, and let them loop. Triton's interpreter runs the blocks of a rank one after the
other: there a block may wait only for what blocks of lower or equal number do, or what the same block did before. A kernel
of one block fulfils both if all that peers wait for comes before all that it waits for itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.triton.flags import behind, look, pause


@triton.jit
def peer_pointer(local_ptr, peers_ptr, peer):
    """Pointer to the first element of a symmetric tensor on rank `peer`.

    local_ptr: the same tensor here; it gives the type. peers_ptr: its table, `SymmetricTensor.peers`. The compiler
    gets the hint that the address is a multiple of 16 bytes; without it, accesses through a table move element by element.
    """
    address = tl.load(peers_ptr + peer)
    return tl.multiple_of(address.to(tl.pointer_type(local_ptr.dtype.element_ty)), 16)


@triton.jit
def _places(base_ptr, offsets, ALIGN: tl.constexpr):
    """Pointers of a tile, of which the compiler knows that ALIGN neighbours go together."""
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
        # A hint sticks to an operation, and the mask may be an argument: this comparison is there to carry it.
        mask = mask & (offsets >= 0)
        mask = tl.max_constancy(mask, [ALIGN]) if len(offsets.shape) == 1 else tl.max_constancy(mask, [1, ALIGN])
    return mask


@triton.jit
def put(dst_ptr, offsets, value, mask=None, ALIGN: tl.constexpr = 1):
    """Store a tile, or a number: value[i] to dst_ptr + offsets[i] where mask[i], as the type of dst_ptr.

    dst_ptr: of a peer (`peer_pointer`), or of memory here. offsets: in elements, not negative. ALIGN: in elements, a power of
    two: the caller's promise that every run of ALIGN neighbours of the tile's last dimension is contiguous, begins at a
    multiple of ALIGN * itemsize bytes, and has one mask value. With 16 bytes of them, accesses are 16 bytes wide, whatever the
    compiler knows of offsets and mask. The peer sees it after a `signal` that it has waited for.
    """
    if mask is None:
        tl.store(_places(dst_ptr, offsets, ALIGN), value)
    else:
        tl.store(_places(dst_ptr, offsets, ALIGN), value, mask=_inside(mask, offsets, ALIGN))


@triton.jit
def get(src_ptr, offsets, mask=None, other=0.0, ALIGN: tl.constexpr = 1):
    """Load a tile that a peer wrote, or that is on a peer: src_ptr[offsets[i]] where mask[i], else `other`.

    Past this SM's first-level cache. offsets, ALIGN: as for `put`.
    """
    if mask is None:
        return tl.load(_places(src_ptr, offsets, ALIGN), cache_modifier=".cg")
    else:  # noqa: RET505 - one of the two is compiled
        return tl.load(_places(src_ptr, offsets, ALIGN), mask=_inside(mask, offsets, ALIGN), other=other, cache_modifier=".cg")


@triton.jit
def reduce_add(dst_ptr, offsets, value, mask=None):
    """Add a tile to memory of a peer, or here: float32, int32 or int64; each element is one atomic addition at system scope.

    The order in which ranks add differs from call to call, and with it the rounding of float32. Who reads the sums must know
    that all have added (`signal` after it, and `wait`), and who adds, that the sums have been set to zero. 16-bit types are
    refused: they would round at each addition.
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
    """Add `by` to a flag, here or at a peer: all that this block has stored before is there for whoever sees it.

    Call it by all threads of the block, once for a tile or for many. Any number of blocks and ranks may signal one flag; then
    only its full count says that all of them have.
    """
    # Every thread's stores before the one release that publishes them.
    tl.debug_barrier()
    tl.atomic_add(flag_ptr, by, sem="release", scope="sys")


@triton.jit
def wait(flag_ptr, at_least, tries, status_ptr):
    """Wait until a flag holds at least `at_least`; whether it did so within `tries` looks.

    flag_ptr: in this rank's memory (a look at a peer's crosses the link). tries, status_ptr: `Peers.tries`, `Peers.status`.
    The first wait of a kernel that ends at its bound leaves there: the flag's address, at_least, and what it saw, for
    `Peers.check` to raise WaitTimeout; waits after it give up at once, so that a kernel ends after one bound.
    """
    seen = look(flag_ptr)
    if behind(seen, at_least):
        # By one thread for all: a block whose warps saw different words would part here.
        looks = tl.where(tl.atomic_add(status_ptr, 0, sem="relaxed", scope="gpu") == 0, 0, tries)
        while behind(seen, at_least) & (looks < tries):
            pause()
            seen = look(flag_ptr)
            looks += 1
        if behind(seen, at_least):
            address = flag_ptr.to(tl.int64)
            if tl.atomic_cas(status_ptr, tl.zeros_like(address), address) == 0:
                tl.store(status_ptr + 1, at_least)
                tl.store(status_ptr + 2, seen)
    return behind(seen, at_least) == 0


@triton.jit
def put_signal(dst_ptr, offsets, value, mask, flag_ptr, by=1, ALIGN: tl.constexpr = 1):
    """`put`, then `signal` a flag at the same peer: sends one tile and notifies its receiver.

    Where a block puts several tiles for one flag, put them all and signal once: a release waits until the peer has taken all
    stores before it.
    """
    put(dst_ptr, offsets, value, mask, ALIGN)
    signal(flag_ptr, by)


@triton.jit
def remote_first(tile, tiles_per_rank, rank, world_size):
    """(dst_rank, tile of dst_rank) of a linear tile in [0, world_size * tiles_per_rank): peers from the successor on, own last.

    Remote tiles start first, own tiles are computed during their transfer, and no two ranks send to one peer at the same time.
    """
    return (rank + 1 + tile // tiles_per_rank) % world_size, tile % tiles_per_rank


@triton.jit
def last_of(count_ptr, arrivals):
    """True in the last of `arrivals` blocks that come here, once for each call.

    count_ptr: int32 or int64 in this rank's memory, zero before the first block; zero again when the last has come. Acquires
    and releases at system scope: the last block sees what the others stored, and what it signals speaks for them, also for
    what they put at peers. The word may be used again by whoever runs after the last block: a later kernel, or what waits
    for it.
    """
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="sys") == arrivals - 1
    if last:
        tl.atomic_xchg(count_ptr, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def call_number(calls_ptr):
    """Which call of the kernel this is, 1 in the first: a flag that grows by D a call is waited for with call_number * D.

    calls_ptr: `Peers.calls()`: two int64 words of one kernel, here. The kernel itself counts, so that it may be replayed in a
    CUDA graph, whose arguments stay what they were. Every block reads the number before it comes to `end_call`; the last
    block to come there writes the next one, and the next call runs after this one: nobody reads it while it changes.
    """
    return tl.load(calls_ptr) + 1


@triton.jit
def end_call(calls_ptr):
    """The end of a kernel that uses `call_number`: every block calls it once, as the last thing that it does."""
    if last_of(calls_ptr + 1, tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)):
        tl.store(calls_ptr, tl.load(calls_ptr) + 1)
