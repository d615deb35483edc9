"""Find out from a program's graph if it can combine the rows of a batch. Requests of such a program must not
be joined.

The analysis follows the dimension of the rows from operator to operator. Its size is a symbol, equal in all
shapes. A value that depends on a request has the rows in exactly one dimension. Operators that are not listed
here count as combining.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols
from torch.utils._pytree import tree_leaves

_BY_SHAPE = frozenset(
    """
    abs_ absolute addmm addmv adjoint alias all alpha_dropout amax amin aminmax any arccos arccosh arcsin
    arcsinh arctan arctan2 arctanh argmax argmin baddbmm bilinear bmm broadcast_to cat cdist chunk clip_
    clone complex concat concatenate conj constant_pad_nd contiguous copy copy_ cosine_similarity
    count_nonzero detach diag_embed diagonal divide divide_ dropout dropout_ empty empty_like eq_ expand
    expand_as feature_dropout fill fill_ fix fleetrun.rows float_power floor_divide frobenius_norm full
    full_like ge_ gelu_ glu greater greater_equal gt_ hardswish hardswish_ imag kthvalue layer_norm le_ less
    less_equal lift lift_fresh lift_fresh_copy linalg_norm linalg_vector_norm linear log_sigmoid logsumexp lt_
    mT masked_fill_ matmul matrix_H max mean median min mish_ mm mode moveaxis movedim multiply multiply_ mv
    nanmean nanmedian nansum narrow ne_ negative new_empty new_full new_ones new_zeros norm not_equal numpy_T
    one_hot ones ones_like outer pad pairwise_distance permute polar prelu prod real reflection_pad1d
    reflection_pad2d repeat replication_pad1d replication_pad2d resolve_conj resolve_neg rms_norm rsub select
    slice split split_with_sizes squeeze stack std std_mean subtract subtract_ sum swapaxes swapdims t
    tensor_split tensordot threshold_ to topk transpose type_as unbind unfold unsafe_chunk unsafe_split
    unsafe_split_with_sizes unsqueeze var var_mean view_as_complex view_as_real where
    zero_ zeros zeros_like __and__ __or__ __iand__ __ior__ masked_fill true_divide
    """.split()  # noqa: SIM905  (a list of 200 lines says no more)
)
"""Operators that keep rows separate if one dimension has all rows before and after."""
_ALONG = "argsort cummax cummin cumprod cumsum flip gather log_softmax logcumsumexp softmax sort".split()  # noqa: SIM905
"""Operators along the dimensions in their second argument, by default the last one."""
_BY_FIRST = frozenset(
    """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    avg_pool1d avg_pool2d avg_pool3d channel_shuffle conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d grid_sampler group_norm im2col instance_norm max_pool1d max_pool2d max_pool3d
    max_pool2d_with_indices pixel_shuffle pixel_unshuffle upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """.split()  # noqa: SIM905
)
"""Operators that handle each element of the first dimension separately."""
_BY_MATRIX = "scaled_dot_product_attention tril triu".split()  # noqa: SIM905
"""Operators that handle each matrix of the last two dimensions separately."""
_RECURRENT = "gru lstm rnn_relu rnn_tanh".split()  # noqa: SIM905
_TABLES = "embedding index index_select searchsorted".split()  # noqa: SIM905
"""Operators that look up each element of another argument in the first one."""
_VIEWS = "_unsafe_view flatten reshape reshape_as unflatten view view_as".split()  # noqa: SIM905
_SIZED = [*_VIEWS, *"broadcast_to empty expand full new_full new_ones new_zeros ones repeat zeros".split()]  # noqa: SIM905
"""Operators whose size arguments may depend on the number of rows."""


def find_mixing(exported: torch.export.ExportedProgram, tensors: Sequence[Tensor]) -> str:
    """Return why rows of the program may depend on other rows of a batch, or "" if they do not.

    `tensors` are its inputs and outputs.
    """
    rows = _size((*tensors[0].shape, 0)[0])
    if any(_places(each, rows) != [(0, rows)] for each in tensors):
        return "the first dimension of its inputs and outputs differs, or occurs in another dimension too"
    for node in exported.graph.nodes:
        if node.op == "call_function" and not _keeps_apart(node, rows):
            return f"operator {node.target} may combine rows of different requests"
    return ""


def keep_rows(graph: Graph) -> None:
    """Let each `squeeze` of the graph remove only dimensions that always have a size of 1.

    It would also remove the dimension of the rows if a request had 1 row.
    """
    squeeze = torch.ops.aten.squeeze
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) is squeeze:
            shape = node.args[0].meta["val"].shape
            places = tree_leaves(node.args[1:]) or range(len(shape))
            node.args = node.args[0], [place for place in places if shape and _size(shape[place]) == 1]
            node.target = squeeze.dims


def repeat_late(module: GraphModule, once: Sequence[bool]) -> GraphModule | None:
    """Return the program for inputs of which some, by `once`, have one row per request.

    Values that depend only on these inputs are computed for these rows, and repeated where they meet other
    values. The last argument of the new program is the request of each row. Rows of the program must not
    depend on each other. Return None for a program that changes values in place, draws random numbers, or
    computes with the number of rows.
    """
    graph = copy.deepcopy(module.graph)
    nodes = list(graph.nodes)
    if any(map(_changes_or_draws, nodes)):
        return None
    inputs = [node for node in nodes if node.op == "placeholder"][-len(once) :]
    rows: Any = _size(inputs[0].meta["val"].shape[0])
    single, sized = _spread(nodes, {node for node, each in zip(inputs, once, strict=True) if each}, rows)
    with graph.inserting_after(inputs[-1]):
        which = graph.placeholder("which")
    for node in reversed(nodes):
        users = [user for user in node.users if not _is_count(user)]
        others = [user for user in users if user not in single]
        place = _own_place(node, rows) if node in single else None
        if node in sized and users and not others:
            single.add(node)
        elif others and place is None:
            if len(users) > len(others) and node in single | sized:
                return None  # the other users are computed once, and cannot take repeated rows
            single.discard(node)
        elif others:
            with graph.inserting_before(min(others, key=nodes.index)):
                late = graph.call_function(torch.ops.aten.index_select.default, (node, place, which))
            for user in others:
                user.replace_input_with(node, late)
    with graph.inserting_after(which):
        each_size = torch.ops.aten.sym_size.int
        counts = [graph.call_function(each_size, (each, 0)) for each in (which, inputs[once.index(True)])]
    for node in nodes:
        if not (_is_count(node) or _takes_count(node, counts[node in single], rows)):
            return None
    graph.eliminate_dead_code()
    return GraphModule(module, graph)


def _changes_or_draws(node: Node) -> bool:
    """Return True if a node changes a value in place, or draws random numbers, as dropout may."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    given = dict(zip((each.name for each in schema.arguments), node.args, strict=False)) | node.kwargs
    return any((schema.is_mutable, *map(given.get, ("train", "training", "dropout_p"))))


def _spread(nodes: Sequence[Node], single: set[Node], rows: object) -> tuple[set[Node], set[Node]]:
    """Return the values that depend only on `single`, and the values with rows that depend on no input."""
    sized: set[Node] = set()
    for node in nodes:
        wide = {
            each
            for each in (node, *node.all_input_nodes)
            if rows in free_symbols(each.meta.get("val")) and not _is_count(each)
        }
        taken = wide - sized - {node}
        if node.op == "call_function" and not _is_count(node) and wide and taken <= single:
            (single if taken else sized).add(node)
    return single, sized


def _own_place(node: Node, rows: object) -> int | None:
    """Return the dimension that contains the rows and nothing else, or None."""
    places = _places(node.meta["val"], rows) if isinstance(node.meta["val"], Tensor) else []
    return places[0][0] if [size for _, size in places] == [rows] else None


def _takes_count(node: Node, count: Node, rows: Any) -> bool:
    """Let a node take its multiples of the number of rows from `count`. Return False for other numbers."""
    for each in filter(_is_count, node.all_input_nodes):
        factor = _size(each.meta["val"]) / rows
        if not factor.is_Integer:
            return False
        with node.graph.inserting_before(node):
            node.replace_input_with(each, node.graph.call_function(operator.mul, (count, int(factor))))
    return True


def _is_count(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _keeps_apart(node: Node, rows: object) -> bool:
    """Return True if each row of the results depends only on the same row of the arguments."""
    taken = [each for each in node.all_input_nodes if rows in free_symbols(each.meta.get("val"))]
    given = [each for each in tree_leaves(node.meta.get("val")) if isinstance(each, Tensor)]
    if not given or not (taken or rows in free_symbols(given)):
        return True
    if not isinstance(node.target, OpOverload):
        node.meta["outer"] = _outer(taken[0])
        return node.target is operator.getitem
    name = str(node.target).rpartition(".")[0].removeprefix("aten.")
    values = [each for each in taken if isinstance(each.meta["val"], Tensor)]
    counts = [each for each in taken if each not in values and (each in node.args or name not in _SIZED)]
    places = [_places(each, rows) for each in (*given, *(each.meta["val"] for each in values))]
    # it computes with the number of rows, or loses the rows
    if counts or any(len(each) != 1 for each in places):
        return False
    outers = {_outer(each) for each in values}
    node.meta["outer"] = next(iter(outers), 1)
    if name in _VIEWS:
        return _is_whole(node, rows)
    if len(outers) > 1 or len({size for ((_, size),) in places}) > 1:
        return False
    return _is_by_row(node, name, values, places[0][0][0], rows)


def _is_whole(node: Node, rows: Any) -> bool:
    """Return True if a view keeps rows side by side, each with as many elements before it as in its source.

    The number of elements before each row within its dimension is stored in `meta`.
    """
    source, view = node.all_input_nodes[0].meta["val"], node.meta["val"]
    ((old, _),), ((new, size),) = _places(source, rows), _places(view, rows)
    before = math.prod(map(_size, source.shape[:old])), math.prod(map(_size, view.shape[:new]))
    outer = node.meta["outer"] = rows * _outer(node) * before[0] / before[1] / rows
    inner = size / rows / outer
    return bool(outer.is_integer and inner.is_integer) and rows not in inner.free_symbols


def _is_by_row(node: Node, name: str, values: Sequence[Node], place: int, rows: object) -> bool:
    """Return True if an operator keeps the rows in dimension `place` of its results separate."""
    args: Any = (*node.args, -1)
    dim, rank = node.kwargs.get("dim", args[1]), tree_leaves(node.meta["val"])[0].dim()
    whole: Any = args[0] in values and [place for place, _ in _places(args[0].meta["val"], rows)]
    return (
        name in _BY_SHAPE
        or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
        or (name in _ALONG and whole == [place] and place not in {each % rank for each in tree_leaves(dim)})
        or (name in _BY_FIRST and place == 0)
        or (name in _BY_MATRIX and place < rank - 2)
        or (name in _RECURRENT and place == (not node.args[-1]))  # batch_first
        or (name == "batch_norm" and not args[5])  # training
        or (name in _TABLES and not whole)
        or (name == "index" and (*args[1], *[None] * rank)[whole[0]] is None)
        or (name == "einsum" and _has_one_letter(args[0], args[1], rows))
    )


def _has_one_letter(equation: str, operands: Sequence[Node], rows: object) -> bool:
    """Return True if an einsum has the same letter for the rows of all operands."""
    terms = equation.replace(" ", "").split("->")[0].split(",")
    both = zip(terms, operands, strict=True)
    found = {term[place] for term, each in both for place, _ in _places(each.meta["val"], rows)}
    return len(found) == 1 and "." not in equation


def _outer(node: Node) -> Any:
    """Return the number of elements before each row within its dimension, which is 1 except in some views."""
    return node.meta.get("outer", 1)


def _places(tensor: Tensor, rows: object) -> list[tuple[int, Any]]:
    """Return the dimensions that contain the rows, and their sizes."""
    return [(place, _size(size)) for place, size in enumerate(tensor.shape) if rows in free_symbols(size)]


def _size(size: int | torch.SymInt) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size
