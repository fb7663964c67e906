"""Triton kernels for communicating matmuls, lookups and collectives, and for the passes before and after them.

gemm.py  gemm_kernel.py                      GEMM with tiles that wait, add, count or are stored at peers: launcher, device code
shapes.py  scattered.py  scaled.py           tile shapes; tiles at peers under one TMA descriptor; scales of FP8 operands
all_reduce.py  mailbox.py                    multiply, exchange and sum few rows in one launch; tiles sent as 32-bit words
exchange.py  segments.py                     grouped GEMMs with all-to-all rows: launchers, layout of segments
ragged.py  ragged_rows.py                    device code of grouped GEMMs, and of row transfers
experts.py                                   passes before and after experts' matmuls
lookup.py  update.py  places.py              embedding bags, the backward of lookups, and the order of its sums
sums.py                                      sums of partial results, and of one contiguous run of all ranks
push.py  quantise.py                         copies by stores from some SMs, plain or quantised to FP8
flag_operations.py                           waits for flags and writes of flags on a compute lane
tables.py                                    the cache of tables on a device
launch.py                                    launches that reuse bound arguments
"""
