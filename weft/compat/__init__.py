"""This room contains everything private or version-dependent that weft calls in torch, Triton, CUDA and NCCL."""
