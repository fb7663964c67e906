"""Triton kernels for steps that are more than a matmul, and for what lies around them.

gemm.py  gemm_kernel.py                      one GEMM whose tiles wait, add, count, or go to peers: launcher, device code
shapes.py  far.py  scaled.py                 its tile shapes; tiles at peers under one descriptor; scales of FP8 operands
all_reduce.py  mailbox.py                    few rows multiplied, exchanged and summed in one launch; tiles as words
exchange.py  segments.py                     grouped GEMMs whose rows go all to all: launchers, who sends what where
ragged.py  ragged_rows.py                    their device code: GEMMs, and rows on their way
experts.py                                   what lies around experts' matmuls
lookup.py  update.py  places.py              bags of embedding tables, their backward, and in which order it sums
reduce.py  runs.py                           sums of partial results, and of contiguous elements of all ranks
push.py  quantise.py                         copies by stores from some SMs, as they are or quantised to FP8 on their way
words.py                                     flags raised and lowered on a compute lane
launch.py  targets.py                        launches that bind nothing again; the GPUs that all of these compile for
"""
