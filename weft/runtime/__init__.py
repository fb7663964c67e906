"""The executors run a checked schedule on real devices.

From a call to a program:

    calls.py  collective_calls.py  ragged.py     a rank's call of an operator, of a collective, or with splits
    gradients.py                                 the backward of lookups
    groups.py  programs.py                       the registry of process groups; a group's calls and its bound programs
    environment.py                               settings from the environment, read before ranks start
    nearest.py                                   the machine profile that is nearest to a device
    buckets.py                                   row counts that are padded to a bucket
    choose.py  tuner.py  autotune.py             from `schedule=` to a schedule: by name or plan, measured before or now
    plan_cache.py                                files with earlier measurements

A program, which is a schedule bound to one rank:

    bound.py  bindings.py  flag_words.py         parts for all devices: addresses of buffers, tensors of a call, flags
    launch_plan.py  launches.py                  the launches of a call, prepared once; the kinds of launches
    arithmetic.py  bags.py  host_rows.py         steps by torch: matmuls and sums; lookups; segments
    host.py  host_resources.py                   on CPUs: a call; shared memory, and lanes as threads
    cuda.py  lane_streams.py                     on GPUs: a call; streams that fork and join
    bound_call.py  replay.py  straight.py        warm calls; calls as CUDA graphs; warm calls without a graph
    order.py  launch_order.py                    the order of the calls of a GPU, and which are in flight; the order of launches
    call_tensors.py                              the tensors of warm calls without a graph, for launches that were prepared
    call_timer.py                                the times at which the steps of a call ran
    cuda_resources.py                            streams and symmetric memory that programs of a process group share on GPUs
    products.py                                  matmuls by the fastest cuBLAS algorithm

Steps as kernels (weft.kernels), on any device whose memory has addresses:

    step_kernels.py                              the interface of these kernels, and the steps that have one
    fused.py  fused_collective.py                GEMMs and sums that wait, count or store at peers; collectives as one kernel
    pushes.py  sums.py  lookups.py               pushes, sums of collectives, embedding bags
    ragged_kernels.py  ragged_steps.py           steps whose row counts are known only on devices, and their tables

Failure:

    peer_waits.py                                bounds for waits of libraries; texts that say what a call waits for
    watchdog.py                                  the thread that bounds each call in flight on a GPU
    release.py                                   after a failure on a GPU: released waits, NaN in results, aborts

Libraries, and the rest:

    nccl.py                                      NCCL's collectives
    network.py  host_wire.py                     messages between nodes by NCCL, and by gloo
    ranks.py  versions.py                        rank processes that weft starts; versions of libraries
"""
