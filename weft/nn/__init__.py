"""Models: styles for torch's parallelize_module, whole models of Hugging Face's, and what was overlapped of them.

sites.py       a place where a model communicates             report.py      all of a model's, with what was measured
products.py    products of column- and row-sharded weights    replicas.py    parameters that are whole on every rank
linear.py      linears that call weft's operators             layouts.py     between torch's layouts and weft's
styles.py      ColwiseParallel, RowwiseParallel, ...          models.py      weft.parallelize
"""
