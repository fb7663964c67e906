"""A mistake in the options of `weft simulate STUDY` is one line that names the option, or the number of the system."""

from __future__ import annotations

import pytest
from conftest import Weft


@pytest.mark.parametrize(
    ("study", "words", "named"),
    [
        ("t4", [], "study is 't4'"),
        ("t3", ["hbm.gbps"], "--set hbm.gbps"),
        ("t3", ["hbm.gbps=1e-300"], "hbm.gbps is 1e-300"),
        ("t3", ["speed=1"], "'speed'"),
        ("t3", ["tile.rows=1"], "tile.rows is 1"),
        ("t3", ["units=16"], "units is 16"),
        ("dlrm", ["topologies=ring"], "topologies[0] is 'ring'"),
        ("dlrm", ["nodes=[8, 4]", "topologies=torus_3d"], "nodes is 4"),
        ("dlrm", ["nodes=20", "topologies=fat_tree"], "nodes is 20"),
        ("dlrm", ["batch=1.5"], "batch is 1.5"),
        ("dlrm", ["collectives.share=2"], "collectives.share is 2.0"),
        ("dlrm", ["fused.slices=100000000"], "fused.slices is 100000000"),
        ("dlrm", ["nodes=65536"], "nodes is 65536"),
        ("ficco", ["links.gbps"], "--set links.gbps"),
        ("ficco", ["copies.several_gbps=0"], "copies.several_gbps is 0.0"),
        ("ficco", ["gpu.sms=many"], "gpu.sms is 'many'"),
        ("ficco", ["world_size=1"], "at least 2 GPUs"),
    ],
)
def test_a_number_that_is_wrong_is_named(weft: Weft, study: str, words: list[str], named: str) -> None:
    status, _, error = weft("simulate", study, *(part for word in words for part in ("--set", word)))
    assert (status, error.count("\n")) == (2, 1)
    assert named in error


@pytest.mark.parametrize("study", ["ficco", "t3"])
def test_a_scenario_that_a_study_lacks_is_named(weft: Weft, study: str) -> None:
    status, _, error = weft("simulate", study, "--scenario", "g17")
    assert status == 2
    assert "g17" in error
