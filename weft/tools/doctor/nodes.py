"""Between nodes: whether messages can go by NVSHMEM where the environment asks for it."""

from __future__ import annotations

from weft.tools.doctor.finding import Finding

_WHAT = "NVSHMEM (messages between nodes)"
_CURE = "install a PyTorch that is built with it (the CUDA wheels are, from 2.9 on), or set WEFT_NODE_TRANSPORT=nccl"


def nvshmem_finding() -> Finding:
    """Its version, or why it is not there: which matters only to those who ask for it. It is loaded, not started."""
    from weft.runtime.network import transport_from_environment
    from weft.runtime.nvshmem import missing, version

    try:
        asked = transport_from_environment() == "nvshmem"
    except ValueError as error:
        return Finding(what=_WHAT, state="missing", detail=str(error), cure="unset it, or choose one of these")
    why = missing()
    if why is None:
        use = "WEFT_NODE_TRANSPORT asks for it" if asked else "NCCL carries them; WEFT_NODE_TRANSPORT=nvshmem would change that"
        return Finding(what=_WHAT, state="ok", detail=f"{version()}; {use}")
    if asked:
        return Finding(what=_WHAT, state="missing", detail=why, cure=_CURE)
    return Finding(what=_WHAT, state="ok", detail=f"{why}; NCCL carries them")
