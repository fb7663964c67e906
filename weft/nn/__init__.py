"""Models: styles for torch's parallelize_module, whole models of Hugging Face's, and what was overlapped of them.

sites.py     the record of a place where a model communicates      report.py      all of a model, with what was measured
flow.py      how tokens lie on ranks, and moves between            products.py    the products of column- and row-sharded weights
linear.py    linears that call weft's operators                    replicas.py    parameters that are whole on every rank
styles.py    ColwiseParallel, RowwiseParallel, SharedInput         models.py      weft.parallelize
"""
