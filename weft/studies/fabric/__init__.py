"""Fabrics: how many GPUs are connected, and what collectives made of single sends take there.

from weft.studies.fabric import Torus, collectives, deliver

sends = collectives.torus_all_gather((4, 4), size=1 << 20)
end_ns = max(deliver(Torus(dims=(4, 4), gbps=25.0, latency_ns=700), sends))
"""

from weft.studies.fabric import collectives
from weft.studies.fabric.sends import Send, deliver
from weft.studies.fabric.topology import Alike, Fabric, FatTree, Hosts, Mesh, Switch, Torus

__all__ = ["Alike", "Fabric", "FatTree", "Hosts", "Mesh", "Send", "Switch", "Torus", "collectives", "deliver"]
