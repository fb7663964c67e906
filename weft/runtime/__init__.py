"""The executors run a checked schedule on real devices.

From a call to a program:

    calls.py  collective_calls.py  ragged.py     a rank's call of an operator, of a collective, or with splits
    gradients.py                                 the backward of lookups
    groups.py  programs.py                       the registry of process groups; a group's calls and its bound programs
    choose.py  tuner.py  autotune.py             from `schedule=` to a schedule: the machine's profile, a name or a plan; what
                                                 was measured before, also for other row counts; the measurement
    plan_cache.py                                files with earlier measurements, and the versions that they hold for

A program, which is a schedule bound to one rank:

    launches.py                                  the kinds of launches and kernels, and the Site where they run
    launch_plan.py                               the launches of a call, prepared once, and their order
    bindings.py                                  the tensors of a call
    bound.py                                     parts for all devices: the memory of buffers, the kernels of steps
    arithmetic.py  products.py                   steps by torch; matmuls by the fastest cuBLAS algorithm
    host.py  host_resources.py                   on CPUs: a call; shared memory, and steps and messages by the host
    cuda.py  cuda_resources.py                   on GPUs: a call; streams, times and memory that programs of a group share
    bound_call.py  replay.py  straight.py        warm calls; calls as CUDA graphs; warm calls without a graph
    order.py                                     the order of the calls of a GPU, and which are in flight

Steps as kernels (weft.kernels), on any device whose memory has addresses. They know of a program only its Site:

    fused.py  fused_collective.py                GEMMs and sums that wait, count or store at peers; collectives as one kernel
    pushes.py  lookups.py                        pushes; embedding bags
    ragged_kernels.py                            steps whose row counts are known only on devices

Failures, libraries, and the rest:

    watchdog.py                                  the thread that bounds each call in flight on a GPU, and what follows a failure
    network.py                                   NCCL's collectives and messages, and bounds for waits of libraries
    ranks.py                                     rank processes that weft starts
"""
