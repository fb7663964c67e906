"""Models: styles for torch's parallelize_module, and tensor parallelism for whole models of Hugging Face.

styles.py  layouts.py                        ColwiseParallel, RowwiseParallel, ...; conversion of torch's layouts to weft's
parallelize.py  blocks.py                    weft.parallelize; a layer's blocks, and which of them run whole
decoder_tokens.py                            the layout of a decoder's tokens, and where it changes; the embedding
tp_plan.py                                   weft.register_tp_plan, for from_pretrained
linear.py  products.py  float8.py            linears that call weft's operators, and their products
parameters.py  replicas.py                   this rank's parts of parameters; parameters that are whole on every rank
experts.py                                   mixture of experts, and the style that shards experts over ranks
embedding_bags.py                            embedding tables that are distributed over ranks
communicating.py                             the communicating layers of a model, which weft.overlap_report lists
preview.py                                   these layers of a config, for weft plan
"""

from __future__ import annotations

from weft.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
