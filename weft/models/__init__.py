"""Models: styles for torch's parallelize_module, and whole models of Hugging Face's.

styles.py  layouts.py                        ColwiseParallel, RowwiseParallel, ...; between torch's layouts and weft's
parallelize.py  moves.py  decoder_tokens.py  weft.parallelize; a decoder's token layouts, and where they change
tp_plan.py  transformers_tp.py                   weft.register_tp_plan, for from_pretrained; the marks of a sharded model
linear.py  products.py                       linears that call weft's operators, what they compute
replicas.py  sharing.py                      parameters that are whole on every rank; those that modules share
experts.py  expert_parallel.py               mixture of experts, and the style that spreads them over ranks
embedding_bags.py                            tables over ranks
communicating.py                             where a model communicates, which weft.report lists
"""

from __future__ import annotations

from weft.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
