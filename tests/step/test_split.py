"""Matrices whose slices have owners of their own: the bits of one process on every layout, and exchanges as planned."""

from __future__ import annotations

from simulated import LAYOUTS, SimulatedRanks, cut, group_of
import pytest
import torch
from shardmuon.layout.views import matrix_view
from shardmuon.plan.machines import MACHINES
from shardmuon.plan.plan import Policy, make_plan, Gram
from shardmuon.step.binding import WireFormat, make_spec
from shardmuon.step.options import OptionsReader
from shardmuon.orthogonalize.choice import Chooser
from shardmuon.step.options import Settings

VIEWS = {
    "wide": lambda: matrix_view((64, 512)),
    "tall": lambda: matrix_view((512, 64)),
    "square": lambda: matrix_view((192, 192)),
    "turned": lambda: matrix_view((96, 384), transposed=True),
    "stack": lambda: matrix_view((2, 96, 384), view="stack"),
    "fused": lambda: matrix_view((144, 384), split_sizes=(32, 4), split_groups=4),
    "kernel": lambda: matrix_view((64, 64, 3, 3)),
}
@pytest.mark.parametrize("k", [2,4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sim(layout, dtype, k):
    machine = MACHINES["h100"]._replace(per_node=8)
    group = group_of()
    (options,) = OptionsReader().read([group])
    def plan(policy, chooser):
        specs=[make_spec(n, LAYOUTS[layout](v()), options, torch.device("cpu"), chooser, WireFormat(4, True), None) for n, v in VIEWS.items()]
        return make_plan(specs, policy)
    torch.manual_seed(0)
    full=[torch.randn(v().shape) for v in VIEWS.values()]
    grads=[[torch.randn(v().shape) for v in VIEWS.values()] for _ in range(2)]
    res=[]
    for split in (1, k):
        import shardmuon.plan.plan as pp
        old=pp._ABOVE_MEAN
        pp._ABOVE_MEAN=0
        old2=pp._by_price_of_slices
        pp._by_price_of_slices=lambda *a: old2(*a)._replace(taken=True)
        try:
            p=plan(Policy(machine=machine, split_k=split, bucket_bytes=400000), Chooser("standard", dtype, split_k=k))
        finally:
            pp._ABOVE_MEAN=old; pp._by_price_of_slices=old2
        print(split, len(p.items), len(p.buckets), [i.owners for i in p.items])
        ranks=SimulatedRanks(p, full)
        for g in grads: ranks.step(g, [group]*len(full))
        res.append(ranks.full_weights())
    for a,b in zip(*res): assert torch.equal(a,b)
