"""Executors: a checked schedule, run on real devices.

From a call to a program:

    calls.py  collective_calls.py  ragged.py     one rank's call: an operator's, a collective's, of rows that only devices count
    gradients.py                                 the backward of lookups
    groups.py  programs.py                       the registry of process groups; a group's calls and its bound programs
    environment.py                               what the environment says, looked at before ranks start
    agreed_profile.py  nearest.py                the machine profile that all ranks use
    buckets.py                                   row counts that are padded to a bucket
    choose.py  tuner.py  autotune.py             from `schedule=` to a schedule: by name or plan; measured before, or here
    plan_cache.py                                what was measured before, in files

A program, which is a schedule bound to one rank:

    bound.py  bindings.py  flag_words.py         what devices share: addresses of buffers, tensors of a call, flags
    launch_plan.py  launches.py                  what a call launches, prepared once; what a launch is
    arithmetic.py  bags.py  host_rows.py         steps by torch: matmuls and sums; lookups; segments
    host.py  host_resources.py                   on CPUs: a call; shared memory, and lanes as threads
    cuda.py  lane_streams.py                     on GPUs: a call; streams that fork and join
    order.py  turn.py  replay.py                 orders in which no stream, and no GPU, is stuck; calls as CUDA graphs
    call_timer.py                                when the steps of a call ran
    cuda_resources.py                            what the programs of a process group share there: streams, symmetric memory
    products.py                                  matmuls, each by the algorithm of cuBLAS that was fastest

Steps as kernels (weft.kernels), on any device whose memory has addresses:

    step_kernels.py                              their interface, and which steps have one
    fused.py  fused_collective.py                GEMMs and sums that wait, count or store at peers; collectives as one kernel
    pushes.py  sums.py  lookups.py               pushes, sums of collectives, embedding bags
    ragged_kernels.py  ragged_steps.py           steps whose row counts live on devices, and their tables

Failure:

    peer_waits.py                                waits that have no bound of weft's own, and what a wait is for, in words
    tickets.py  watchdog.py                      the calls in flight on a GPU, and the thread that bounds each of them
    release.py                                   what follows a failure there: released waits, NaN in results, aborts

What others move, and the rest:

    nccl.py  unscheduled.py                      NCCL's collectives; what no schedule describes
    network.py  host_wire.py                     messages between nodes: NCCL's, gloo's
    ranks.py  versions.py                        rank processes of weft's own; versions of all that takes part
"""
