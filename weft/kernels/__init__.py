"""Triton kernels for communicating matmuls, lookups and collectives, and for the passes before and after them.

gemm.py  gemm_kernel.py                      one GEMM whose tiles wait, add, count or are stored at peers: launcher, device code
shapes.py  scattered.py  scaled.py           its tile shapes; tiles at peers under one descriptor; scales of FP8 operands
all_reduce.py  mailbox.py                    multiply, exchange and sum few rows in one launch; tiles sent as 32-bit words
exchange.py  segments.py                     grouped GEMMs with all-to-all rows: launchers, layout of segments
ragged.py  ragged_rows.py                    their device code: GEMMs, row transfers
experts.py                                   passes before and after experts' matmuls
lookup.py  update.py  places.py              embedding bags, their backward, and its order of summation
reduce.py  runs.py                           sums of partial results, and of one contiguous range on all ranks
push.py  quantise.py                         copies by stores from some SMs, plain or quantised to FP8
flag_operations.py                           flags raised and lowered on a compute lane
launch.py  targets.py                        launches that reuse bound arguments; the GPUs that the kernels compile for
"""
