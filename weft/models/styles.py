"""Styles for torch.distributed.tensor.parallel.parallelize_module, which replace torch's styles of the same names.

    style                 input_layouts   output_layouts     runs
    ColwiseParallel       Shard(tokens)   Shard(-1)          all_gather_matmul
                          Replicate()     Shard(-1)          a matmul; its input's gradient by matmul_all_reduce
    RowwiseParallel       Shard(-1)       Shard(tokens)      matmul_reduce_scatter
                          Shard(-1)       Replicate()        matmul_all_reduce
    SharedInput           Shard(tokens)   of its linears     one all_gather_matmul for several linears (Q, K and V)
    SequenceParallel      Shard(tokens)   Shard(tokens)      the module itself, on plain tensors

Shard(tokens) is any dimension but the last. Weights are sharded as by torch's styles, so checkpoints are the same.

With other layouts, and for modules that are not plain nn.Linear, torch's own style is applied. weft.overlap_report(model) lists
the reason.

Linears that torchao.float8.convert_to_float8_training has converted are multiplied in FP8, also in the backward pass, as their
Float8LinearConfig says. Apply these styles instead of torchao's, which also cast the input of a module:

    Float8ColwiseParallel           ColwiseParallel
    Float8RowwiseParallel           RowwiseParallel
    PrepareFloat8ModuleInput        SharedInput, on the module whose linears share an input

Sizes must be multiples of 16: inputs and outputs of a rank's part of a weight, and the tokens of a training step. Use
module_filter_fn to leave linears of other sizes unconverted. Raises ValueError for such sizes, for pad_inner_dim=True, and if
casts of the input, the weight or grad_output are disabled. With emulate=True only the local products are emulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import style
from torch.distributed.tensor.placement_types import Placement

from weft.core.errors import require
from weft.models.communicating import CommunicatingLayer, LayerCalls, record_layer
from weft.models.layouts import Announce, ColumnsOut, RowsIn, Taken, TokensOut
from weft.models.linear import (
    Distributor,
    InputHook,
    SharedInputLinears,
    Tokens,
    make_column_linears,
    make_row_linear,
    require_one_dimension,
    why_not_linear,
)
from weft.models.parameters import get_process_group
from weft.models.products import ProductSettings
from weft.models.replicas import always, replicate


class ColwiseParallel(style.ColwiseParallel):
    """torch's ColwiseParallel, which overlaps the gather of a sharded input with the matmul.

    input_layouts, output_layouts, use_local_output: as torch's. torch converts to output_layouts other than Shard(-1) after the
    matmul.
    schedule: a name, as for weft.all_gather_matmul. The backward pass uses "auto" if its operator does not have this family.
    keep_gathered: keep the gathered input for the weight's gradient, as torch's style does. Otherwise the backward pass gathers
    it again.

    Raises ValueError for an unknown schedule, and for one that all_gather_matmul does not have if the input is sharded.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        schedule: str = "auto",
        keep_gathered: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.settings = ProductSettings(schedule=schedule, keep_gathered=keep_gathered)
        if isinstance(self.input_layouts[0], Shard):  # otherwise only the backward pass communicates
            self.settings.require("all_gather_matmul")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_one_dimension(device_mesh)
        why = why_not_linear(module, ranks=device_mesh.size()) or _why_not_tokens("input_layouts", self.input_layouts[0])
        if why:
            record_layer(module, CommunicatingLayer(reason=f"torch's ColwiseParallel: {why}"))
            return super()._apply(module, device_mesh)
        linear, tokens = cast(nn.Linear, module), Tokens()
        shared = make_column_linears([linear], tokens, self.settings, Distributor(device_mesh, self.src_data_rank))
        record_layer(linear, describe_columns(shared, self.input_layouts[0]))
        _note_moved(linear, "output", self.output_layouts[0], "after")
        linear.register_forward_pre_hook(
            InputHook("input", Taken(device_mesh, self.input_layouts[0], tokens)), with_kwargs=True
        )
        linear.register_forward_hook(ColumnsOut(device_mesh, self.output_layouts[0], self.use_local_output))
        return linear


class RowwiseParallel(style.RowwiseParallel):
    """torch's RowwiseParallel, which overlaps the reduction of the output with the matmul.

    input_layouts, output_layouts, use_local_output: as torch's.
    schedule: a name, as for weft.matmul_reduce_scatter, or weft.matmul_all_reduce if the output is Replicate(). The backward
    pass uses "auto" if its operator does not have this family.

    Raises ValueError for an unknown schedule, and for one that the operator does not have.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        schedule: str = "auto",
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.settings = ProductSettings(schedule=schedule)
        self.settings.require("matmul_reduce_scatter" if isinstance(self.output_layouts[0], Shard) else "matmul_all_reduce")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_one_dimension(device_mesh)
        why = why_not_linear(module, row=True, ranks=device_mesh.size())
        why = why or _why_not_tokens("output_layouts", self.output_layouts[0])
        if why:
            record_layer(module, CommunicatingLayer(reason=f"torch's RowwiseParallel: {why}"))
            return super()._apply(module, device_mesh)
        linear, tokens, output = cast(nn.Linear, module), Tokens(), self.output_layouts[0]
        ran = make_row_linear(linear, tokens, self.settings, Distributor(device_mesh, self.src_data_rank))
        record_layer(linear, describe_row(linear, output, self.settings, ran))
        _note_moved(linear, "input", self.input_layouts[0], "before")
        taken = RowsIn(device_mesh, self.input_layouts[0], output, tokens)
        linear.register_forward_pre_hook(InputHook("input", taken), with_kwargs=True)
        if not self.use_local_output:
            linear.register_forward_hook(TokensOut(device_mesh, output, tokens, contiguous=True))
        return linear


class SharedInput(style.ParallelStyle):
    """For a module whose linears read one tensor (Q, K, V; gate and up). It is gathered once, and the gather overlaps all
    matmuls.

        {"attention": weft.SharedInput(["wq", "wk", "wv"]), "attention.wo": weft.RowwiseParallel(output_layouts=Shard(1))}

    This replaces PrepareModuleInput on the module, and ColwiseParallel on the linears.

    linears: names of the module's children. Their outputs are sharded on the last dimension.
    input_layouts: the layout of the module's input, which is the keyword argument `argument`, or else the first positional one.
    schedule, keep_gathered: as for ColwiseParallel.

    The module receives a tensor of the gathered shape that is filled with NaN. Its own code may read the shape and pass the
    tensor to these linears, but must not compute with it. While the module or one of these linears has a hook that you
    registered, the input is gathered before the matmuls, and has its values; a warning says so. Raises ValueError for other
    layouts or children.
    """

    def __init__(
        self,
        linears: Sequence[str],
        *,
        input_layouts: Placement = Shard(1),  # noqa: B008 - a frozen value
        argument: str = "hidden_states",
        schedule: str = "auto",
        keep_gathered: bool = True,
    ) -> None:
        super().__init__()
        why = _why_not_tokens("input_layouts", input_layouts)
        if why or not linears or isinstance(linears, str):
            raise ValueError(why or f"linears is {linears!r}; name the children that read the module's input, in a list")
        self.linears, self.input_layout, self.argument = tuple(linears), input_layouts, argument
        self.settings = ProductSettings(schedule=schedule, keep_gathered=keep_gathered)
        if isinstance(input_layouts, Shard):
            self.settings.require("all_gather_matmul")

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_one_dimension(device_mesh)
        children = dict(module.named_children())
        for name in self.linears:
            why = f"{type(module).__name__} has no child of that name"
            if name in children:
                why = why_not_linear(children[name], ranks=device_mesh.size())
            if why:
                raise ValueError(f"linears names {name!r}, but {why}")
        shared = share_input(
            module,
            self.linears,
            Taken(device_mesh, self.input_layout, Tokens()),
            self.settings,
            Distributor(device_mesh, self.src_data_rank),
            argument=self.argument,
        )
        record_layer(module, describe_columns(shared, self.input_layout, parts=self.linears))
        return module


class SequenceParallel(style.SequenceParallel):
    """torch's SequenceParallel without DTensor's dispatch: the module computes on plain tensors.

    sequence_dim, use_local_output: as torch's. The gradients of its parameters are summed over ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        require_one_dimension(device_mesh)
        replicate(module, Distributor(device_mesh, self.src_data_rank), always)
        tokens, layout = Tokens(), self.sequence_sharding[0]
        module.register_forward_pre_hook(InputHook("input", Taken(device_mesh, layout, tokens)), with_kwargs=True)
        if not self.use_local_output:
            module.register_forward_hook(TokensOut(device_mesh, layout, tokens, contiguous=False))
        return module


def share_input(
    module: nn.Module, names: Sequence[str], taken: Taken, settings: ProductSettings, distribute: Distributor, *, argument: str
) -> SharedInputLinears:
    """Let these children share a gather of the module's input, which `taken` makes plain."""
    linears = [cast(nn.Linear, module.get_submodule(name)) for name in names]
    shared = make_column_linears(linears, taken.tokens, settings, distribute)
    module.register_forward_pre_hook(Announce(argument, shared, tuple(names), type(module).__name__, taken), with_kwargs=True)
    module.register_forward_hook(shared.drop_products)
    return shared


def describe_columns(
    shared: SharedInputLinears, layout: Placement, *, parts: Sequence[str] = (), alone: bool = False
) -> CommunicatingLayer:
    """Describe column-sharded linears that share an input.

    The process group is read from their weights, because torch uses the first of two meshes with the same ranks and names.

    alone: each linear is multiplied by itself.
    """
    linears, whole = shared.members, layout.is_replicate()
    widths, k = [linear.out_features for linear in linears], linears[0].in_features
    (n, k), *others = [(k, width) if whole else (width, k) for width in (widths if alone else [sum(widths)])]
    return CommunicatingLayer(
        parts=tuple(parts),
        operators=("matmul_all_reduce",) if whole else ("all_gather_matmul",),
        reason="for the gradient of the input; the matmul itself has nothing to wait for" if whole else "",
        n=n,
        k=k,
        other_sizes=tuple(others),
        group=get_process_group(linears[0].weight).group_name,
        schedule=shared.settings.schedule,
        ran=shared.ran,
        backward_only=whole,
        keeps=None if whole else shared.settings.keep_gathered,
    )


def describe_row(
    linear: nn.Linear,
    output: Placement,
    settings: ProductSettings,
    ran: LayerCalls,
    *,
    parts: Sequence[str] = (),
    also: Sequence[str] = (),
    reason: str = "",
) -> CommunicatingLayer:
    """Describe a row-sharded linear.

    ran: its calls so far.
    also: operators that some of its calls run.
    reason: why it does not run others.
    """
    operator = "matmul_all_reduce" if output.is_replicate() else "matmul_reduce_scatter"
    n, k, name = linear.out_features, linear.in_features, get_process_group(linear.weight).group_name
    return CommunicatingLayer(
        parts=tuple(parts),
        operators=(operator, *also),
        reason=reason,
        n=n,
        k=k,
        group=name,
        schedule=settings.schedule,
        ran=ran,
    )


def _note_moved(linear: nn.Module, what: str, layout: Placement, when: str) -> None:
    """Record another layer if torch changes the layout of a linear's input or output."""
    if layout != Shard(-1):
        preposition = "from" if what == "input" else "to"
        record_layer(linear, CommunicatingLayer(reason=f"torch brings the {what} {preposition} {layout!r} {when} the matmul"))


def _why_not_tokens(name: str, layout: Placement) -> str:
    """Return why weft's operators do not take this layout, or "" if they do. Raises ValueError for other types."""
    require(name, layout, Placement, "use Replicate() or Shard(dimension)")
    if layout.is_replicate() or (isinstance(layout, Shard) and layout.dim != -1):
        return ""
    return f"{name} is {layout!r}; weft overlaps Replicate(), and Shard of a dimension of tokens"
